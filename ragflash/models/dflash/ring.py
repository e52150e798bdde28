"""Keys and values of the newest tokens of a sequence, in every layer of a drafter."""

import struct
from abc import ABC, abstractmethod

import torch

RING_TOKENS = 4096

_HEADER = struct.Struct("<8s4I2q")
_MAGIC = b"DFLASHKV"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Ring(ABC):
    """The newest tokens of a sequence: which positions are held; subclasses know where.

    Args:
        num_tokens: Most of them.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._start = self._end = 0

    @property
    def num_tokens(self) -> int:
        """Size."""
        return self._num_tokens

    @property
    def start(self) -> int:
        """Position of the oldest token that is there."""
        return self._start

    @property
    def end(self) -> int:
        """Position of the token that comes next."""
        return self._end

    def advance(self, num_tokens: int) -> None:
        """Count tokens that were written from `end` on."""
        self._end += num_tokens
        self._start = max(self._start, self._end - self._num_tokens)

    def truncate(self, position: int) -> None:
        """Forget tokens from a position on; all, when none before it is held.

        Raises:
            ValueError: The position is not reached yet.
        """
        if not 0 <= position <= self._end:
            raise ValueError(f"position {position} is not within 0…{self._end}")
        self._end = position
        self._start = min(self._start, position)

    def restart(self, position: int) -> None:
        """Forget everything; the next token is that of a position."""
        self._start = self._end = position

    @abstractmethod
    def export(self) -> bytes:
        """Return what is held, as `load` takes it."""

    @abstractmethod
    def load(self, state: bytes) -> None:
        """Replace everything by what `export` returned, the newest part where this is smaller.

        Raises:
            ValueError: It is of another drafter or dtype, or cut.
        """


class KVRing(Ring):
    """A token's place is its position modulo the size, so that nothing is ever moved.

    Args:
        num_layers: Layers.
        num_heads: Heads of K, and of V.
        head_dim: Values a head.
        dtype: Of the values.
        device: Where they lie.
        num_tokens: Size.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_tokens: int = RING_TOKENS,
    ) -> None:
        super().__init__(num_tokens)
        shape = (2, num_layers, num_tokens, num_heads, head_dim)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    def append(self, kv: torch.Tensor) -> None:
        """Write keys and values `[2, L, N, H, D]` of the tokens from `end` on."""
        kept = kv[:, :, -self.num_tokens :]
        end = self.end + kv.shape[2]
        slots = torch.arange(end - kept.shape[2], end, device=kv.device)
        self._values[:, :, slots % self.num_tokens] = kept
        self.advance(kv.shape[2])

    def newest(self, layer: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V `[N, H, D]` of a layer's newest tokens in order, at most `count`."""
        held = self._end - self._start
        first = self._end - (held if count is None else min(held, count))
        begin, length = first % self.num_tokens, self._end - first
        values = self._values[:, layer]
        if begin + length > self.num_tokens:
            wrapped = begin + length - self.num_tokens
            keys, others = torch.cat((values[:, begin:], values[:, :wrapped]), dim=1)
        else:
            keys, others = values[:, begin : begin + length]
        return keys, others

    def export(self) -> bytes:
        """See `Ring`."""
        layers = range(self._values.shape[1])
        held = torch.stack([torch.stack(self.newest(layer)) for layer in layers])
        return pack_state(held, self.start)

    def load(self, state: bytes) -> None:
        """See `Ring`."""
        _, num_layers, _, num_heads, head_dim = self._values.shape
        start, held = unpack_state(state, (num_layers, num_heads, head_dim), self._values.dtype)
        self.restart(start)
        self.append(held.transpose(0, 1).to(self._values.device))


def pack_state(held: torch.Tensor, start: int) -> bytes:
    """Return keys and values `[L, 2, N, H, D]` of the tokens from a position on as bytes."""
    num_layers, _, num_tokens, num_heads, head_dim = held.shape
    kind, end = _DTYPES[held.dtype], start + num_tokens
    header = _HEADER.pack(_MAGIC, kind, num_layers, num_heads, head_dim, start, end)
    return header + held.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def unpack_state(
    state: bytes, sizes: tuple[int, int, int], dtype: torch.dtype
) -> tuple[int, torch.Tensor]:
    """Return what `pack_state` was given: the position, and keys and values.

    Args:
        state: What it returned.
        sizes: Layers, heads, and values a head that are expected.
        dtype: Expected.

    Raises:
        ValueError: It is of another drafter or dtype, or cut.
    """
    expected = (_MAGIC, _DTYPES[dtype], *sizes)
    if len(state) < _HEADER.size or _HEADER.unpack_from(state)[:5] != expected:
        raise ValueError("the stored state of a drafter is another drafter's")
    start, end = _HEADER.unpack_from(state)[5:]
    num_layers, num_heads, head_dim = sizes
    shape = (num_layers, 2, end - start, num_heads, head_dim)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not 0 <= start <= end or len(state) - _HEADER.size != num_bytes:
        raise ValueError("the stored state of a drafter is damaged")
    if start == end:
        return start, torch.empty(shape, dtype=dtype)
    held = torch.frombuffer(bytearray(state), dtype=torch.uint8, offset=_HEADER.size)
    return start, held.view(dtype).view(shape)
