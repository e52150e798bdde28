"""What stored keys and values depend on besides tokens, field by field."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

FORMAT_VERSION = 1
MAX_NAMED_BYTES = 3600
"""Room for the named fields in a file's header."""

MTP_PART, DRAFTER_PART = "mtp", "drafter"
"""Names of optional parts: what drafters keep of a segment."""

Value = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A stored segment is used only where every field is the same.

    Values that are long are given as hashes; `ValueError` when all do not fit a file's header.

    Attributes:
        weights: Content hash of the model file.
        architecture: Its family, as the file names it.
        rope: The values of the rotary embedding in effect, scaling included.
        arithmetic: Device, number formats and revision of the kernels, as far as bits depend on it.
        chunk_plan: Where a prefill is cut.
        key_format: How keys are stored.
        value_format: How values are stored.
        rotation: What heads are rotated with before they are packed.
        codebook: The levels that packed values are rounded to.
        key_offsets: Hash of what is taken off keys before they are packed.
        page_tokens: Tokens of a page.
        grid_tokens: Tokens of a grid block; 0 when all pages are exact.
        layer_plan: Kind and shape of every layer's keys, values and recurrent state.
        tokenizer: Hash of the vocabulary and its rules.
        template: Hash of the chat template.
        rules: Hash of the rules' text.
        drafter: Hash of the drafter's weights, for its own part alone.
        mtp: Hash of the model's own drafting layers, for their own part alone.
        format_version: Of the file.
    """

    weights: str
    architecture: str
    rope: str
    arithmetic: str
    chunk_plan: str
    key_format: str
    value_format: str
    rotation: str
    codebook: str
    key_offsets: str
    page_tokens: int
    grid_tokens: int
    layer_plan: str
    tokenizer: str
    template: str
    rules: str
    drafter: str = ""
    mtp: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if len(self.canonical) > MAX_NAMED_BYTES:
            raise ValueError(f"the identity's fields take {len(self.canonical)} bytes: hash them")

    @property
    def named(self) -> dict[str, Value]:
        """All fields but those of optional parts."""
        names = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in names if name not in {DRAFTER_PART, MTP_PART}}

    @property
    def canonical(self) -> bytes:
        """`named` in the one spelling that is hashed and stored."""
        return spell(self.named)

    @property
    def digest(self) -> str:
        """SHA-256 of `canonical` in hexadecimal digits."""
        return hashlib.sha256(self.canonical).hexdigest()

    def of_part(self, name: str) -> str:
        """Return what an optional part depends on besides `digest`; empty for nothing."""
        return {DRAFTER_PART: self.drafter, MTP_PART: self.mtp}.get(name, "")

    def difference(self, other: Mapping[str, Value]) -> str | None:
        """Name the first field whose value in another identity's `named` is not the same."""
        mine = self.named
        names = (*mine, *(name for name in other if name not in mine))
        return next((name for name in names if mine.get(name) != other.get(name)), None)


def spell(named: Mapping[str, Value]) -> bytes:
    """Spell fields as JSON with sorted names and no blanks."""
    return json.dumps(named, sort_keys=True, separators=(",", ":")).encode("ascii")
