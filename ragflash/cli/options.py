"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "CtxOption",
    "DataDirOption",
    "Device",
    "DeviceOption",
    "JsonOption",
    "KvFormat",
    "KvOption",
    "ModelOption",
    "SlotsOption",
    "VerifyRowsOption",
    "VramOption",
]


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class KvFormat(StrEnum):
    """How keys and values are stored."""

    AUTO = "auto"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    TQ4 = "tq4"
    TQ3_0 = "tq3_0"


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output.")
]
DataDirOption = Annotated[
    Path | None, typer.Option(help="Folder of documents and index. [env: RAGFLASH_DATA_DIR]")
]
ModelOption = Annotated[
    Path | None, typer.Option(help="GGUF file of the model. [env: RAGFLASH_MODEL]")
]
DeviceOption = Annotated[
    Device | None, typer.Option("--device", help="Card or processor. [env: RAGFLASH_DEVICE]")
]
VramOption = Annotated[
    float | None,
    typer.Option(
        "--vram", help="Of the card's memory, at most that many GiB. [env: RAGFLASH_VRAM_GB]"
    ),
]
CtxOption = Annotated[
    int | None, typer.Option("--ctx", help="Tokens of context. [env: RAGFLASH_CONTEXT_TOKENS]")
]
KvOption = Annotated[
    KvFormat | None,
    typer.Option("--kv", help="Format of keys and values. [env: RAGFLASH_KV_FORMAT]"),
]
SlotsOption = Annotated[
    int | None,
    typer.Option("--slots", help="Sequences decoded together. [env: RAGFLASH_MAX_SLOTS]"),
]
VerifyRowsOption = Annotated[
    int | None,
    typer.Option("--verify-rows", help="Rows of a verification. [env: RAGFLASH_VERIFY_ROWS]"),
]
