"""A prompt as tokens, cut into segments, each token traced to the document it copies.

Each piece is tokenised alone, so that where a segment ends never depends on what follows it. Runs
on the caller's thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ragflash.engine.request import ChatMessage, SegmentKind, Span, TextSegment
from ragflash.engine.tokens import Piece, Template, Tokenizer
from ragflash.errors import InputError, TemplateInvalid

NO_SOURCE = -1
# An answer under constraints begins where the prompt ends, so no model may think there unasked.
_DEFAULTS: Mapping[str, object] = MappingProxyType({"enable_thinking": False})


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Which document characters the tokens of a run copy; arrays of one length.

    Attributes:
        source: Index into `CompiledPrompt.source_ids`, or `NO_SOURCE`.
        start: First character in the document.
        end: Exclusive.
        lead: Characters of the token before `start` (white space of ours).
    """

    source: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    lead: NDArray[np.int64]

    @classmethod
    def none(cls, num_tokens: int) -> "TokenSources":
        """Return arrays for tokens that copy nothing."""
        zeros = np.zeros(num_tokens, dtype=np.int64)
        return cls(np.full(num_tokens, NO_SOURCE, dtype=np.int64), zeros, zeros, zeros)


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """A run of prompt tokens that is cached, or not, as one: a content and the markup before it.

    Attributes:
        source_ids: Documents that its content copies from.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...]
    source_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class CompiledPrompt:
    """What the worker needs to know of a prompt.

    Attributes:
        segments: None is empty. The last one holds what follows the last content, such as the
            generation prompt.
        source_ids: Documents that `sources` counts.
        sources: Of all tokens.
    """

    segments: tuple[TokenSegment, ...]
    source_ids: tuple[str, ...]
    sources: TokenSources

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens in order."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def ends(self) -> tuple[int, ...]:
        """Number of tokens up to the end of each segment."""
        return tuple(accumulate(len(segment.token_ids) for segment in self.segments))

    def with_last_token_apart(self) -> "CompiledPrompt":
        """Return the same tokens in segments that are all stored but for the last token."""
        *before, last = self.segments
        if len(last.token_ids) > 1:
            before.append(replace(last, token_ids=last.token_ids[:-1]))
            last = replace(last, token_ids=last.token_ids[-1:])
        stored = (
            replace(segment, kind=SegmentKind.CONVERSATION)
            if segment.kind is SegmentKind.QUESTION
            else segment
            for segment in before
        )
        return replace(self, segments=(*stored, last))


def compile_prompt(
    messages: Sequence[ChatMessage],
    template: Template,
    tokenizer: Tokenizer,
    variables: Mapping[str, object] | None = None,
) -> CompiledPrompt:
    """Render messages with a generation prompt and cut them into token segments.

    Args:
        messages: In order.
        template: The model's.
        tokenizer: The model's.
        variables: What the template is told besides; `enable_thinking` is false unless set here.

    Raises:
        InputError: There is no text at all, or the template refuses these messages, or it fails
            with these variables.
        TemplateInvalid: The template fails by itself.
    """
    parts = [segment for message in messages for segment in message.segments]
    source_ids = tuple(dict.fromkeys(span.source_id for part in parts for span in part.spans))
    segments: list[TokenSegment] = []
    sources: list[TokenSources] = []
    markup: list[int] = []
    for at, piece in enumerate(_rendered(_spoken(messages), template, variables or {})):
        if piece.part_index is None:
            is_markup = piece.kind == "markup"
            encode = tokenizer.encode_markup if is_markup else tokenizer.encode
            markup += encode(piece.text, opens=at == 0)
            continue
        part = parts[piece.part_index]
        token_ids, token_sources = _content(part, source_ids, tokenizer)
        sources += [TokenSources.none(len(markup)), token_sources]
        used = frozenset(span.source_id for span in part.spans)
        segments.append(TokenSegment(part.kind, (*markup, *token_ids), used))
        markup = []
    sources.append(TokenSources.none(len(markup)))
    segments.append(TokenSegment(SegmentKind.QUESTION, tuple(markup), frozenset()))
    return _finish(segments, source_ids, sources, tokenizer)


def begins_alike(
    messages: Sequence[ChatMessage],
    template: Template,
    variables: Mapping[str, object],
    num_segments: int,
) -> bool:
    """Whether the first segments of messages are rendered as they are alone, without variables.

    Raises as `compile_prompt`.
    """
    whole = _rendered(_spoken(messages), template, variables)
    alone = _rendered(_spoken(_first_of(messages, num_segments)), template, {})
    last = next(n for n, piece in enumerate(alone) if piece.part_index == num_segments - 1)
    return list(whole[: last + 1]) == list(alone[: last + 1])


def _first_of(messages: Sequence[ChatMessage], num_segments: int) -> Iterator[ChatMessage]:
    for message in messages:
        segments = message.segments[:num_segments]
        num_segments -= len(segments)
        if segments:
            yield replace(message, segments=segments)


def _spoken(messages: Iterable[ChatMessage]) -> list[tuple[str, tuple[str, ...]]]:
    """Return roles and texts, as a template takes them."""
    return [(m.role, tuple(segment.text for segment in m.segments)) for m in messages]


def _rendered(
    turns: Sequence[tuple[str, Sequence[str]]], template: Template, variables: Mapping[str, object]
) -> Sequence[Piece]:
    try:
        return template.render_pieces(turns, {**_DEFAULTS, **variables})
    except TemplateInvalid as error:
        if not variables:
            raise
        raise InputError(f"with {', '.join(variables)} as given, {error}") from error


def compile_text(text: str, tokenizer: Tokenizer) -> CompiledPrompt:
    """Make a prompt of plain text, without template and control tokens.

    Raises:
        InputError: There is no text at all.
    """
    token_ids = tuple(tokenizer.encode(text, opens=True))
    segment = TokenSegment(SegmentKind.QUESTION, token_ids, frozenset())
    return _finish([segment], (), [TokenSources.none(len(token_ids))], tokenizer)


def _finish(
    segments: list[TokenSegment],
    source_ids: tuple[str, ...],
    sources: list[TokenSources],
    tokenizer: Tokenizer,
) -> CompiledPrompt:
    segments = [segment for segment in segments if segment.token_ids]
    if not segments:
        raise InputError("the prompt holds no text")
    bos_id = tokenizer.bos_id
    if tokenizer.add_bos and bos_id is not None and segments[0].token_ids[0] != bos_id:
        first = segments[0]
        segments[0] = TokenSegment(first.kind, (bos_id, *first.token_ids), first.source_ids)
        sources.insert(0, TokenSources.none(1))
    return CompiledPrompt(tuple(segments), source_ids, _joined(sources))


def _content(
    part: TextSegment, source_ids: Sequence[str], tokenizer: Tokenizer
) -> tuple[Sequence[int], TokenSources]:
    if not part.spans:
        token_ids = tokenizer.encode(part.text)
        return token_ids, TokenSources.none(len(token_ids))
    token_ids, starts = tokenizer.encode_with_offsets(part.text)
    first = np.asarray(starts, dtype=np.int64)
    last = np.append(first[1:], len(part.text))[: len(first)]
    return token_ids, _trace(part, first, last, source_ids)


def _trace(
    part: TextSegment,
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    source_ids: Sequence[str],
) -> TokenSources:
    """Map the characters `first … last` of each token to the part's spans."""
    source = np.full(len(first), NO_SOURCE, dtype=np.int64)
    start, end, lead = (np.zeros(len(first), dtype=np.int64) for _ in range(3))
    for span in part.spans:
        stop = span.start + span.length
        # Tokens inside one character share its start and, but for the last, are empty ranges.
        after_start = (last > span.start) | (first >= span.start)
        touched = np.flatnonzero(after_start & (first < stop))
        touched = touched[_copies(part.text, first, last, touched, span)]
        shift = span.source_start - span.start
        source[touched] = source_ids.index(span.source_id)
        start[touched] = np.maximum(first[touched], span.start) + shift
        end[touched] = np.minimum(last[touched], stop) + shift
        lead[touched] = np.maximum(span.start - first[touched], 0)
    return TokenSources(source, start, end, lead)


def _copies(
    text: str,
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    touched: NDArray[np.int64],
    span: Span,
) -> NDArray[np.bool_]:
    """Tell which tokens copy a span: they lie in it but for white space."""
    copies = np.ones(len(touched), dtype=np.bool_)
    for at in {0, len(touched) - 1} if len(touched) else ():
        token = touched[at]
        before = text[first[token] : max(first[token], span.start)]
        after = text[min(last[token], span.start + span.length) : last[token]]
        copies[at] = not (before + after).strip()
    return copies


def _joined(sources: Iterable[TokenSources]) -> TokenSources:
    runs = list(sources)
    return TokenSources(
        np.concatenate([run.source for run in runs]),
        np.concatenate([run.start for run in runs]),
        np.concatenate([run.end for run in runs]),
        np.concatenate([run.lead for run in runs]),
    )
