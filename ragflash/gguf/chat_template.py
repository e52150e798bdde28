"""Chat templates from model files: untrusted programs, run with bounds, cut at what they wrap.

A prompt is rendered once with a placeholder in the place of every content part and then cut at the
placeholders. Content never passes through the template, so it arrives verbatim, and each piece
can be tokenised alone: where one piece ends never depends on what follows. What else a template
is given (tools, tool calls, reasoning) it may take apart; there, what looks like a control token is
kept out of its sight and comes back as content.
"""

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from jinja2.exceptions import TemplateError

from ragflash.errors import InputError, TemplateInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.template_builtin import BUILTIN_TEMPLATES, builtin_family
from ragflash.gguf.template_sandbox import TemplateRefusal, TemplateSandbox
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.gguf.vocabulary import MarkupFinder

MAX_SOURCE_CHARACTERS = 2**20
MAX_OUTPUT_CHARACTERS = 16 * 2**20
_PLACEHOLDER = re.compile(r"(Part[0-9a-f]{32})")

__all__ = ["ChatTemplate", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a rendered prompt.

    Attributes:
        kind: `markup` is the template's own text, in which control tokens are meant; `content`
            is what was passed in.
        part_index: Which part it is, counted over all messages; None for markup, and for the
            spelling of a control token in something else that was passed in.
    """

    kind: Literal["markup", "content"]
    text: str
    part_index: int | None = None


class ChatTemplate:
    """A model's chat template, compiled; safe to share between threads.

    Attributes:
        source: Its text.
        origin: Where it comes from: `model file`, or `built-in` and the family's name.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        origin: str = "model file",
        reserved: MarkupFinder | None = None,
        time_limit_ms: int = 2_000,
    ) -> None:
        """Compile `source`.

        Args:
            source: Jinja.
            bos_token: The template may write it.
            eos_token: The template may write it.
            origin: See above.
            reserved: Finds what nobody but the template may spell.
            time_limit_ms: Of one rendering.

        Raises:
            TemplateInvalid: It is too long or not a template.
        """
        self.source = source
        self.origin = origin
        self._reserved = reserved or MarkupFinder()
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
        """The template in `file`, or where there is none the one of the vocabulary's family.

        Raises:
            TemplateInvalid: It does not compile.
        """
        source, origin = file.get("tokenizer.chat_template", str), "model file"
        if source is None:
            family = builtin_family(tokenizer.markup.tokens)
            source, origin = BUILTIN_TEMPLATES[family], f"built-in {family}"
        bos, eos = (
            "" if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(
            source,
            bos_token=bos,
            eos_token=eos,
            origin=origin,
            reserved=tokenizer.markup,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages (`role`, `content`, whatever else the template reads) to one text.

        Args:
            messages: In order.
            variables: `tools`, `enable_thinking`, whatever else the template knows.
            add_generation_prompt: Whether the turn of the assistant is opened at the end.

        Raises:
            InputError: The template refuses the messages or variables.
            TemplateInvalid: It fails, or exceeds its limits.
        """
        context = {
            "tools": None,  # transformers defines both, and templates ask for them without a check
            "documents": None,
            **(variables or {}),
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
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
        variables: Mapping[str, object] | None = None,
        *,
        fields: Mapping[int, Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Piece]:
        """Render `(role, content parts)` and cut the result where parts begin and end.

        The texts of the pieces together are the prompt. Parts are kept as they are, even where
        the template would trim them or treat some contents in a way of its own: it sees a word
        without blanks in their place. No piece is empty; an empty part leaves none. Where the
        template refuses the messages, plain turns of one role that follow each other are made one
        turn, a blank line between them: clients send such turns, and some templates insist that
        roles alternate.

        Args:
            messages: In order.
            variables: As in `render`.
            fields: What else the template reads of a message (`tool_calls`, `reasoning_content`),
                by the index of the message.
            add_generation_prompt: As in `render`.

        Raises:
            InputError: As in `render`.
            TemplateInvalid: As in `render`; or the template leaves out, repeats, changes or
                reorders a part.
        """
        guard = _Guard(self._reserved)
        shown: list[dict[str, object]] = [
            {
                **guard.mapping((fields or {}).get(index, {})),
                "role": guard.text(role),
                "content": "".join(map(guard.part, parts)),
            }
            for index, (role, parts) in enumerate(messages)
        ]
        told = guard.mapping(variables or {})
        try:
            rendered = self.render(shown, told, add_generation_prompt=add_generation_prompt)
        except InputError:
            joined = _join_turns(shown)
            if len(joined) == len(shown):
                raise
            rendered = self.render(joined, told, add_generation_prompt=add_generation_prompt)
        return list(guard.cut(rendered))

    def _run(self, context: Mapping[str, object]) -> Iterator[str]:
        """The chunks of one rendering, each checked against the clock."""
        self._sandbox.start(time.monotonic() + self._time_limit_ms / 1000)
        try:
            for chunk in self._template.generate(context):
                self._sandbox.tick()
                yield chunk
        except TemplateRefusal as error:
            raise InputError(f"the model's chat template refuses this: {error}") from error
        except TemplateError as error:
            raise TemplateInvalid(f"the chat template fails: {error}") from error
        except Exception as error:  # a foreign program: it can fail in any way that Python can
            raise TemplateInvalid(
                f"the chat template fails: {type(error).__name__}: {error}"
            ) from error


def _join_turns(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The same messages with plain turns of one role in a row made one."""
    joined: list[dict[str, object]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.keys() == message.keys() == {"role", "content"} and last["role"] == message["role"]:
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            joined.append(dict(message))
    return joined


@dataclass(slots=True)
class _Guard:
    """Stands in for what a template must not see, in one rendering.

    Attributes:
        reserved: Finds control tokens in texts.
    """

    reserved: MarkupFinder
    _parts: dict[str, Piece] = field(default_factory=dict)
    _spelled: dict[str, Piece] = field(default_factory=dict)
    _num_parts: int = 0

    def part(self, text: str) -> str:
        """Stand in for a content part."""
        index = self._num_parts
        self._num_parts += 1
        if not text:
            return ""
        return self._stand_in(self._parts, Piece("content", text, index))

    def text(self, text: str) -> str:
        """Stand in for the control tokens in a text."""
        return "".join(
            self._stand_in(self._spelled, Piece("content", run)) if is_token else run
            for run, is_token in self.reserved.split(text)
        )

    def mapping(self, values: Mapping[str, object]) -> dict[str, object]:
        """Stand in for the control tokens in all names and texts of a mapping."""
        return {self.text(key): self._value(value) for key, value in values.items()}

    def cut(self, rendered: str) -> Iterator[Piece]:
        """The pieces of a prompt.

        Raises:
            TemplateInvalid: A part is missing, repeated or out of order.
        """
        shown = [word for word in _PLACEHOLDER.findall(rendered) if word in self._parts]
        if shown != list(self._parts):
            misplaced = (n for n, word in enumerate(self._parts) if shown[n : n + 1] != [word])
            at = next(misplaced, len(self._parts) - 1)
            raise TemplateInvalid(
                f"the chat template does not show part {at} of the messages exactly once, "
                "unchanged and in order"
            )
        known = {**self._parts, **self._spelled}
        markup = ""
        for run in _PLACEHOLDER.split(rendered):
            piece = known.get(run)
            if piece is None:
                markup += run
                continue
            if markup:
                yield Piece("markup", markup)
            markup = ""
            yield piece
        if markup:
            yield Piece("markup", markup)

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self.mapping(value)
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return value

    @staticmethod
    def _stand_in(kept: dict[str, Piece], piece: Piece) -> str:
        placeholder = f"Part{secrets.token_hex(16)}"
        kept[placeholder] = piece
        return placeholder
