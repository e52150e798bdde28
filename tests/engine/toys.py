"""Models, tokenizers, templates and drafters of a few lines each.

`ToyModel` keeps the token ids themselves as keys, and predicts from what it reads back from the
pages: a page that is shared, copied, restored or rolled back wrongly shows as a wrong prediction.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ragflash.engine.request import (
    ChatMessage,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.models.contract import ForwardBatch, SequenceRows
from ragflash.speculative.drafter import Draft

Logits = Callable[[Sequence[int]], torch.Tensor]


class ToyTokenizer:
    """Greedy longest match over byte strings; ids are places in the list, then control tokens."""

    add_bos = False
    bos_id = None
    fingerprint = "toy"

    def __init__(
        self, pieces: Sequence[bytes], *, controls: Sequence[str] = (), stop: Sequence[str] = ()
    ) -> None:
        self._bytes = [*pieces, *(b"" for _ in controls)]
        self._ids = {piece: at for at, piece in reversed([*enumerate(pieces)])}
        self._controls = {name: len(pieces) + at for at, name in enumerate(controls)}
        self._longest = max(map(len, pieces))
        self.vocab_size = len(self._bytes)
        self.stop_ids = frozenset(self._controls[name] for name in stop)

    def encode(self, text: str, *, opens: bool = False) -> list[int]:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        data = text.encode()
        char_of_byte = [at for at, char in enumerate(text) for _ in char.encode()]
        ids, starts, at = [], [], 0
        while at < len(data):
            ends = range(min(at + self._longest, len(data)), at, -1)
            end = next(end for end in ends if data[at:end] in self._ids)
            ids.append(self._ids[data[at:end]])
            starts.append(char_of_byte[at])
            at = end
        return ids, starts

    def encode_markup(self, text: str, *, opens: bool = False) -> list[int]:
        for name, token_id in self._controls.items():
            before, found, after = text.partition(name)
            if found:
                return [*self.encode_markup(before), token_id, *self.encode_markup(after)]
        return self.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


END, TURN = "<|end|>", "<|turn|>"


def byte_tokenizer(*words: str) -> ToyTokenizer:
    """All bytes, and words as tokens of their own."""
    pieces = [*(bytes([value]) for value in range(256)), *(word.encode() for word in words)]
    return ToyTokenizer(pieces, controls=(END, TURN), stop=(END,))


@dataclass(frozen=True)
class ToyPiece:
    kind: str
    text: str
    part_index: int | None = None


class RawTemplate:
    """Contents one after the other, nothing else."""

    def render_pieces(self, messages, variables=None):
        parts = [part for _, parts in messages for part in parts]
        return [ToyPiece("content", part, at) for at, part in enumerate(parts)]


class TurnTemplate:
    """`<|turn|>role:…<|end|>` a message, then `<|turn|>assistant:`."""

    def render_pieces(self, messages, variables=None):
        pieces, index = [], 0
        for role, parts in messages:
            pieces.append(ToyPiece("markup", f"{TURN}{role}:"))
            for part in parts:
                pieces.append(ToyPiece("content", part, index))
                index += 1
            pieces.append(ToyPiece("markup", END))
        return [*pieces, ToyPiece("markup", f"{TURN}assistant:")]


class ToyModel:
    """Predicts from the token ids that it finds in its pages."""

    compute_dtype = torch.float32
    is_recurrent = False
    kv_layout = KVLayout.uniform(1, 1, 1, torch.float32)

    def __init__(self, logits: Logits, *, vocab_size: int, context_tokens: int = 1 << 20) -> None:
        self._logits = logits
        self.vocab_size = vocab_size
        self.context_tokens = context_tokens
        self.steps: list[dict[int, int]] = []  # rows of each slot
        self.before_forward: Callable[[], None] = lambda: None

    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        self.before_forward()
        self.steps.append({rows.slot: rows.num_rows for rows in batch.sequences})
        start, wanted = 0, []
        for rows in batch.sequences:
            ids = batch.token_ids[start : start + rows.num_rows]
            positions = batch.positions[start : start + rows.num_rows]
            paths = paths_of(rows)
            assert positions.tolist() == [rows.committed + len(path) - 1 for path in paths]
            start += rows.num_rows
            keys = ids.float().reshape(-1, 1, 1)
            pages.exact.write(0, rows.pages, rows.committed, keys, keys)
            if rows.logit_rows:
                stored = pages.exact.keys(0)[list(rows.pages), 0, :, 0].flatten()[
                    : rows.committed + rows.num_rows
                ]
                tokens = stored.long().tolist()
                before, own = tokens[: rows.committed], tokens[rows.committed :]
                ends = ([own[at] for at in paths[row]] for row in rows.logit_rows)
                wanted += [self._logits(before + end) for end in ends]
        return torch.stack(wanted) if wanted else torch.empty(0, self.vocab_size)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        pass

    def reset(self, slot: int) -> None:
        pass

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        return ()

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        assert state == ()


class ToyRecurrentModel:
    """State `s = (31·s + token) mod 65536`, next token `s mod vocab`; no attention at all."""

    compute_dtype = torch.float32
    is_recurrent = True
    kv_layout = KVLayout((), torch.float32)
    context_tokens = 1 << 20

    def __init__(self, *, vocab_size: int, start: int = 7, commits_all: bool = False) -> None:
        self.vocab_size = vocab_size
        self.states: dict[int, int] = {}
        self.committed_states: list[int] = []
        self._start = start
        self._commits_all = commits_all
        self._tape: dict[int, list[int]] = {}

    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        ids, wanted = iter(batch.token_ids.tolist()), []
        for rows in batch.sequences:
            tape: list[int] = []
            for path in paths_of(rows):
                state = tape[path[-2]] if len(path) > 1 else self.states[rows.slot]
                tape.append((31 * state + next(ids)) % 65536)
            self._tape[rows.slot] = tape
            wanted += [tape[row] % self.vocab_size for row in rows.logit_rows]
        return one_hot(wanted, self.vocab_size)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        tape = self._tape.pop(slot)
        self.states[slot] = tape[-1 if self._commits_all else path[-1]]
        self.committed_states.append(self.states[slot])

    def reset(self, slot: int) -> None:
        self.states[slot] = self._start

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        return (torch.tensor(self.states[slot]),)

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        self.states[slot] = int(state[0])


def paths_of(rows: SequenceRows) -> list[list[int]]:
    """Rows from the first to each, one after the other as their parents say."""
    paths: list[list[int]] = []
    for row in range(rows.num_rows):
        parent = row - 1 if rows.parents is None else rows.parents[row]
        paths.append([*(paths[parent] if parent >= 0 else ()), row])
    return paths


def one_hot(token_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    ids = torch.tensor(token_ids, dtype=torch.int64)
    return 20.0 * torch.nn.functional.one_hot(ids, vocab_size).float()


def random_logits(
    vocab_size: int, *, looks_back: int = 1 << 20, never: Iterable[int] = ()
) -> Logits:
    """Logits that depend on every token of the history; those in `never` are not drawn."""
    hidden = [*never]

    def logits(history: Sequence[int]) -> torch.Tensor:
        rng = np.random.default_rng([len(history), *history[-looks_back:]])
        scores = torch.from_numpy(2 * rng.normal(size=vocab_size)).float()
        scores[hidden] = -100.0
        return scores

    return logits


def greedy_model(
    next_token: Callable[[Sequence[int]], int], vocab_size: int, **options
) -> ToyModel:
    return ToyModel(
        lambda history: one_hot([next_token(history)], vocab_size)[0],
        vocab_size=vocab_size,
        **options,
    )


class StubDrafter:
    """Proposes what a function says, and remembers what it was told."""

    def __init__(self, propose: Callable[[Sequence[int], int], Sequence[int] | Draft]) -> None:
        self._propose = propose
        self.observed: list[tuple[int, int]] = []
        self.told: list[Draft] = []

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        proposed = self._propose(history, budget)
        return proposed if isinstance(proposed, Draft) else Draft(tuple(proposed), "stub")

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        self.observed.append((len(draft), len(accepted)))
        self.told.append(draft)

    def export_state(self) -> bytes:
        return b""

    def load_state(self, state: bytes) -> None:
        pass


def chain(next_token: Callable[[Sequence[int]], int]) -> Callable[[Sequence[int], int], list[int]]:
    """The perfect drafter of a greedy toy."""

    def propose(history: Sequence[int], budget: int) -> list[int]:
        seen = [*history]
        for _ in range(budget):
            seen.append(next_token(seen))
        return seen[len(history) :]

    return propose


def user(*segments: TextSegment) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", segments),)


def question(text: str) -> TextSegment:
    return TextSegment(SegmentKind.QUESTION, text)


def document(text: str, source_id: str, *, head: str = "") -> TextSegment:
    span = Span(source_id, 0, len(head), len(text))
    return TextSegment(SegmentKind.DOCUMENT, head + text, (span,))


def ask(text: str, *before: TextSegment, name: str = "r", **options) -> GenerateRequest:
    return GenerateRequest(id=name, messages=user(*before, question(text)), **options)
