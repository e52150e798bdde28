"""Chat templates from model files: untrusted programs, run with bounds, cut at what they wrap.

A prompt is rendered once with a placeholder in the place of every content part and then cut at the
placeholders. Content never passes through the template, so it arrives verbatim, and each piece
can be tokenised alone: where one piece ends never depends on what follows.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from jinja2.exceptions import TemplateError

from ragflash.errors import TemplateInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.template_sandbox import TemplateSandbox
from ragflash.gguf.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 2**20
MAX_OUTPUT_CHARACTERS = 16 * 2**20

__all__ = ["ChatTemplate", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a rendered prompt.

    Attributes:
        kind: `markup` is the template's own text, in which control tokens are meant; `content`
            is what was passed in.
        part_index: Which part it is, counted over all messages; None for markup.
    """

    kind: Literal["markup", "content"]
    text: str
    part_index: int | None = None


class ChatTemplate:
    """A model's chat template, compiled; safe to share between threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        time_limit_ms: int = 2_000,
    ) -> None:
        """Compile `source`.

        Raises:
            TemplateInvalid: It is too long or not a template.
        """
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateInvalid(
                f"the chat template has {len(source)} characters, {MAX_SOURCE_CHARACTERS} at most"
            )
        self._sandbox = TemplateSandbox()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._time_limit_ms = time_limit_ms
        try:
            self._template = self._sandbox.bounded_template(source)
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise TemplateInvalid(f"the chat template does not compile: {error}") from error

    @classmethod
    def from_gguf(cls, file: GGUFFile, tokenizer: Tokenizer) -> Self:
        """The template in `file`.

        Raises:
            TemplateInvalid: There is none, or it does not compile.
        """
        source = file.get("tokenizer.chat_template", str)
        if source is None:
            raise TemplateInvalid(
                f"{file.path.name} has no chat template; it holds a base model, use an instruct one"
            )
        bos, eos = (
            "" if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(source, bos_token=bos, eos_token=eos)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Render messages (`role`, `content`, whatever else the template reads) to one text.

        Raises:
            TemplateInvalid: The template fails, refuses the messages, or exceeds its limits.
        """
        context = {
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        chunks: list[str] = []
        length = 0
        for chunk in self._run(context):
            chunks.append(chunk)
            length += len(chunk)
            if length > MAX_OUTPUT_CHARACTERS:
                raise TemplateInvalid(
                    f"the chat template writes more than {MAX_OUTPUT_CHARACTERS} characters"
                )
        return "".join(chunks)

    def render_pieces(
        self,
        messages: Sequence[tuple[str, Sequence[str]]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[Piece]:
        """Render `(role, content parts)` and cut the result where parts begin and end.

        The texts of the pieces together are the prompt. Parts are kept as they are, even where
        the template would trim them or treat some contents in a way of its own: it sees a word
        without blanks in their place. Pieces of markup are never empty; parts may be.

        Raises:
            TemplateInvalid: As in `render`; or the template leaves out, repeats, changes or
                reorders a part.
        """
        parts = [part for _, message_parts in messages for part in message_parts]
        placeholders = [f"Part{secrets.token_hex(16)}" for _ in parts]
        unused = iter(placeholders)
        rendered = self.render(
            [
                {"role": role, "content": "".join(next(unused) for _ in message_parts)}
                for role, message_parts in messages
            ],
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return list(_cut(rendered, placeholders, parts))

    def _run(self, context: Mapping[str, object]) -> Iterator[str]:
        """The chunks of one rendering, each checked against the clock."""
        self._sandbox.start(time.monotonic() + self._time_limit_ms / 1000)
        try:
            for chunk in self._template.generate(context):
                self._sandbox.tick()
                yield chunk
        except TemplateError as error:
            raise TemplateInvalid(f"the chat template fails: {error}") from error
        except Exception as error:  # a foreign program: it can fail in any way that Python can
            raise TemplateInvalid(
                f"the chat template fails: {type(error).__name__}: {error}"
            ) from error


def _cut(rendered: str, placeholders: Sequence[str], parts: Sequence[str]) -> Iterator[Piece]:
    position = 0
    for index, (placeholder, part) in enumerate(zip(placeholders, parts, strict=True)):
        found = rendered.find(placeholder, position)
        if found < 0 or rendered.count(placeholder) != 1:
            raise TemplateInvalid(
                f"the chat template does not show part {index} of the messages exactly once, "
                "unchanged and in order"
            )
        if found > position:
            yield Piece("markup", rendered[position:found])
        yield Piece("content", part, index)
        position = found + len(placeholder)
    if position < len(rendered):
        yield Piece("markup", rendered[position:])
