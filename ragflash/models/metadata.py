"""Sizes and constants that a GGUF file gives for its architecture."""

from collections.abc import Iterable

from ragflash.errors import GGUFInvalid, ModelError
from ragflash.gguf.reader import GGUFFile


class Metadata:
    """Reads keys below `general.architecture` and refuses values that make no sense.

    Every method raises `GGUFInvalid` for a value of another type or outside its range, and for a
    key that is absent where no default is given.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.require("general.architecture", str)

    def key(self, name: str) -> str:
        """Return the full key of a name."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the file has the key."""
        return self.key(name) in self.file.metadata

    def size(self, name: str, default: int | None = None) -> int:
        """Return an integer ≥ 1."""
        value = self.file.get(self.key(name), int)
        if value is None:
            value = self.file.require(self.key(name), int) if default is None else default
        if value < 1:
            raise GGUFInvalid(self.key(name), 0, f"{value} is not positive")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """Return an integer ≥ 0."""
        value = self.file.get(self.key(name), int)
        if value is None:
            return default
        if value < 0:
            raise GGUFInvalid(self.key(name), 0, f"{value} is negative")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number > 0 and finite."""
        value = self.file.get(self.key(name), float)
        if value is None:
            value = self.file.require(self.key(name), float) if default is None else default
        if not 0 < value < float("inf"):
            raise GGUFInvalid(self.key(name), 0, f"{value} is not a positive number")
        return value

    def sizes(self, name: str, num_layers: int, default: int | None = None) -> tuple[int, ...]:
        """Return integers ≥ 1, one a layer; files give one for all or an array."""
        if not isinstance(self.file.metadata.get(self.key(name)), tuple):
            return (self.size(name, default),) * num_layers
        values = self.file.require_array(self.key(name), int)
        if len(values) < num_layers or min(values, default=0) < 1:
            raise GGUFInvalid(
                self.key(name), 0, f"is not {num_layers} positive numbers, one a layer"
            )
        return values[:num_layers]

    def flags(self, name: str, num_layers: int) -> tuple[bool, ...] | None:
        """Return booleans, one a layer, or `None` where the key is absent."""
        values = self.file.get_array(self.key(name), bool)
        if values is not None and len(values) < num_layers:
            raise GGUFInvalid(self.key(name), 0, f"has {len(values)} of {num_layers} layers")
        return None if values is None else values[:num_layers]

    def num_layers(self) -> int:
        """Return the number of blocks; each has tensors, so there cannot be more than of these."""
        value = self.size("block_count")
        if value > len(self.file.tensors):
            key, held = self.key("block_count"), len(self.file.tensors)
            raise GGUFInvalid(key, 0, f"{value} blocks cannot be made of {held} tensors")
        return value

    def heads(self, hidden_size: int) -> tuple[int, int, int]:
        """Return query heads, key heads and the size of a head, all layers alike."""
        num_heads = self.size("attention.head_count")
        num_kv_heads = self.size("attention.head_count_kv", num_heads)
        self.require_shared(num_heads, [num_kv_heads])
        head_dim = self.size("attention.key_length", hidden_size // num_heads)
        self.require_equal("attention.value_length", head_dim)
        return num_heads, num_kv_heads, head_dim

    def require_shared(self, num_heads: int, num_kv_heads: Iterable[int]) -> None:
        """Refuse key heads that cannot be shared out evenly among the query heads."""
        for number in num_kv_heads:
            if num_heads % number:
                key = self.key("attention.head_count_kv")
                raise GGUFInvalid(key, 0, f"{number} does not divide {num_heads}")

    def require_rotated(self, head_dim: int, suffix: str = "") -> None:
        """Refuse heads whose dimensions do not all rotate, in pairs.

        Raises:
            ModelError: Only some do, or there is an odd one.
        """
        self.require_equal(f"rope.dimension_count{suffix}", head_dim)
        if head_dim % 2:
            raise ModelError(f"heads of {head_dim} values are not implemented, only even ones")

    def vocab_size(self) -> int:
        """Return the rows of the embedding table; 0 without one."""
        embedding = self.file.tensors.get("token_embd.weight")
        return embedding.shape[0] if embedding else 0

    def require_equal(self, name: str, expected: int) -> None:
        """Refuse a size that this architecture's code takes to be another.

        Raises:
            ModelError: The file says something else than `expected`.
        """
        value = self.size(name, expected)
        if value != expected:
            raise ModelError(f"{self.key(name)} = {value} is not implemented, only {expected}")

    def refuse_rope_scaling(self) -> None:
        """Raise `ModelError` for files that stretch positions by a formula."""
        scaling = self.file.get(self.key("rope.scaling.type"), str)
        if scaling not in {None, "none"}:
            raise ModelError(
                f"RoPE scaling {scaling!r} is not implemented for {self.architecture} files"
            )
        if self.file.get(self.key("rope.scale_linear"), float) not in {None, 1.0}:
            raise ModelError(
                f"linear RoPE scaling is not implemented for {self.architecture} files"
            )

    def refuse(self, name: str, what: str) -> None:
        """Raise `ModelError` when a count is not 0: the file wants what is not implemented."""
        if self.count(name):
            raise ModelError(f"{self.architecture} files with {what} are not implemented")
