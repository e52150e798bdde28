"""What the engine asks of a tokenizer and of a chat template."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back; safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def bos_id(self) -> int | None:
        """Token that begins every sequence, when the model has one."""

    @property
    def add_bos(self) -> bool:
        """Whether a prompt must begin with `bos_id`."""

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides how text is cut."""

    def encode(self, text: str, *, opens: bool = False) -> Sequence[int]:
        """Cut plain text, which may open a prompt; no control token is recognised in it."""

    def encode_markup(self, text: str, *, opens: bool = False) -> Sequence[int]:
        """Cut template text, which may open a prompt and in which control tokens are recognised."""

    def encode_with_offsets(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Cut plain text and give the character that each token starts at, or in."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; none for a control token."""


class Piece(Protocol):
    """A run of a rendered prompt: the template's own text, or content that was passed in."""

    @property
    def kind(self) -> str:
        """`markup` or `content`."""

    @property
    def text(self) -> str:
        """The run itself."""

    @property
    def part_index(self) -> int | None:
        """Which of the parts it is, counted over all messages; `None` for what is none."""


class Template(Protocol):
    """A model's chat template."""

    def render_pieces(
        self,
        messages: Sequence[tuple[str, Sequence[str]]],
        variables: Mapping[str, object] | None = None,
    ) -> Sequence[Piece]:
        """Render `(role, parts)` turns and a generation prompt, cut where parts begin and end."""
