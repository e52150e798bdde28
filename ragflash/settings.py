"""Every knob, read once from `RAGFLASH_*` variables and flags.

Only the command line and `ragflash.api.app` import this; the rest receives small frozen configs.
"""

import difflib
import ipaddress
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ragflash.errors import SettingInvalid
from ragflash.log import LogFormat

__all__ = ["Settings", "is_loopback", "load_settings"]

PREFIX = "RAGFLASH_"
_FOR_TESTS = PREFIX + "TEST_"

MIB = 1024 * 1024


class Settings(BaseSettings):
    """All settings; a field is set by `RAGFLASH_` and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    data_dir: Path = Field(
        default_factory=lambda: Path.home() / ".local" / "share" / "ragflash",
        description="Folder of documents, index and database; one process at a time owns it.",
    )

    host: str = Field("127.0.0.1", description="Address that the server binds to.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    api_key: SecretStr | None = Field(
        None, min_length=8, description="Key that clients must send; needed beyond loopback."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (), description="More names (JSON list) that clients may use in the Host header."
    )
    heartbeat_s: float = Field(
        10.0, gt=0, le=120, description="Longest silence of a stream, in seconds."
    )
    max_upload_bytes: int = Field(
        100 * MIB, gt=0, description="Largest document accepted, in bytes."
    )

    model: Path | None = Field(
        None,
        description="GGUF file of the language model, or any part or the folder of a split one; "
        "unset takes the packaged one.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type that the model computes in on the processor; auto takes its fastest.",
    )
    weights: Literal["dense", "packed"] = Field(
        "dense",
        description="On the processor, `packed` leaves Q4_0, Q4_1 and Q4_K matrices packed: less "
        "memory, faster decoding, products rounded to bfloat16.",
    )
    pre_tokenizer: str | None = Field(
        None,
        description="How the model cuts text into words, for a file that names a way that is not "
        "known; unset goes by the file.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto takes a graphics card that can be used."
    )
    vram_gb: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Memory of the card that may be used, in GiB; unset takes what is free.",
    )
    context_tokens: int | None = Field(
        None,
        ge=256,
        description="Tokens of context that running and remembered prompts share; unset takes what "
        "fits the card, or RAGFLASH_KV_BYTES.",
    )
    kv_format: Literal["auto", "f16", "q8_0", "q4_0", "tq4", "tq3_0"] = Field(
        "auto",
        description="How keys and values are stored; auto takes what was measured to be good "
        "enough for the model file, q8_0 on a card for an unknown one.",
    )
    draft: Literal["auto", "off"] = Field(
        "auto",
        description="Whether answers are drafted from documents and output where that is faster; "
        "they are the same either way.",
    )
    mtp: Literal["auto", "off"] = Field(
        "auto",
        description="Whether the model file's block of multi-token prediction drafts, too, where "
        "there is one.",
    )
    drafter: Path | None = Field(
        None,
        description="DFlash drafter of the model: a GGUF file, or on the processor a folder with "
        "safetensors.",
    )
    verify_rows: int = Field(
        21, ge=1, le=32, description="Most rows of a request in one step, its drafts included."
    )
    kv_bytes: int = Field(
        1024 * MIB,
        gt=0,
        description="Memory for keys and values of running and remembered prompts on the "
        "processor, in bytes.",
    )
    sessions_gb: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="Most that files of remembered prompts take in the data folder, in GiB, so "
        "that a document read once is not read again after a restart; 0 keeps none.",
    )
    sessions_collection_gb: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Most that those of one collection take, in GiB; unset leaves each as much as "
        "all together.",
    )
    sessions_daily_write_gb: float = Field(
        100.0,
        ge=0,
        allow_inf_nan=False,
        description="Most that is written to them in a day (UTC), in GiB, for the sake of flash "
        "memory; 0 sets no limit.",
    )
    max_slots: int = Field(4, ge=1, le=64, description="Requests that are decoded together.")
    queue_size: int = Field(
        32, ge=1, description="Requests that may wait for a slot; more are answered 429."
    )
    prefill_chunk_tokens: int = Field(
        512,
        ge=16,
        description="Prompt tokens computed between two decoding steps on the processor; on a card "
        "they are 2048.",
    )
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0 takes every core.")

    embed_model: Path | None = Field(
        None,
        description="Folder of a sentence-transformers model; unset takes the packaged one.",
    )
    qdrant_url: str | None = Field(
        None,
        pattern=r"^https?://[^@\s]+$",
        description="Qdrant server that holds the vectors, as http://host:6333; unset keeps them "
        "in the data folder.",
    )
    qdrant_api_key: SecretStr | None = Field(
        None, min_length=1, description="Key of the Qdrant server; it needs to read and write."
    )
    qdrant_timeout_s: int = Field(
        30, ge=1, description="Longest wait for one answer of the Qdrant server, in seconds."
    )
    parse_timeout_s: float = Field(
        120.0, gt=0, description="Longest time a parser may spend on one document, in seconds."
    )
    parse_memory_bytes: int = Field(
        2048 * MIB, ge=64 * MIB, description="Memory that one parser process may use, in bytes."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe events that are logged."
    )
    log_format: LogFormat = Field(LogFormat.TEXT, description="`text` (key=value) or `json`.")

    def check_exposure(self) -> None:
        """Raise `SettingInvalid` when the server would be reachable from outside without a key."""
        if self.api_key is None and not is_loopback(self.host):
            raise SettingInvalid(
                f"host {self.host} is reachable from other machines and no key is set: set "
                f"{PREFIX}API_KEY to a secret of at least 8 characters, or bind to 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_settings(**flags: object) -> Settings:
    """Read the environment; flags that are not `None` win over it.

    Raises:
        SettingInvalid: A value is out of range, or a `RAGFLASH_` variable is not a setting.
    """
    _check_names()
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        faults = "; ".join(
            f"{PREFIX}{'.'.join(str(part) for part in fault['loc']).upper()}: {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False)
        )
        raise SettingInvalid(faults) from None  # the cause would print the key
    except ValueError as error:
        raise SettingInvalid(str(error)) from error


def _check_names() -> None:
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    for name in os.environ:
        if not name.startswith(PREFIX) or name.startswith(_FOR_TESTS) or name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        raise SettingInvalid(f"{name} is not a setting: {hint}")
