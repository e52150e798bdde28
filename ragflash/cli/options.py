"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["DataDirOption", "JsonOption", "ModelOption"]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output.")
]
DataDirOption = Annotated[
    Path | None, typer.Option(help="Folder of documents and index. [env: RAGFLASH_DATA_DIR]")
]
ModelOption = Annotated[
    Path | None, typer.Option(help="GGUF file of the model. [env: RAGFLASH_MODEL]")
]
