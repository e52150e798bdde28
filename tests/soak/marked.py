"""Documents full of marks that no other has, and a model that answers with what its pages hold.

The model keeps a code for each token as key and value, reads tokens back from the pages of a
sequence, and spells the mark that it is asked for as it finds it there; then four digits of its
recurrent state. A foreign page shows as a foreign mark, a foreign state as other digits.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ragflash.engine.request import SegmentKind, TextSegment
from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.models.contract import ForwardBatch, SequenceRows
from tests.engine.toys import byte_tokenizer, document, one_hot

TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
STOP = min(TOKENIZER.stop_ids)
HEAD_DIM = 32
MARK = re.compile(rb"\[(\w{16})\]")
UNREADABLE = 0
RULES = TextSegment(SegmentKind.RULES, "answer with the mark;")
BITS = torch.arange(10)  # of a token's number; each is said three times


def code_of(ids: torch.Tensor) -> torch.Tensor:
    """Spell token numbers `[T]` as signs `[T, 32]`; the first two say nothing."""
    bits = (ids[:, None] >> BITS & 1).repeat(1, 3)
    return torch.cat((torch.ones(len(ids), 2), 2.0 * bits - 1), dim=1)


def token_of(codes: torch.Tensor) -> torch.Tensor:
    """Read token numbers back, rounded as they may be."""
    bits = codes[:, 2:].reshape(-1, 3, len(BITS)).sum(dim=1) > 0
    return (bits << BITS).sum(dim=1)


@dataclass(frozen=True)
class MarkedDocument:
    """A text, and the marks in it in their order; no other number has any of them."""

    number: int
    marks: tuple[str, ...]
    text: str

    @property
    def source_id(self) -> str:
        return f"document {self.number}"

    @property
    def segment(self) -> TextSegment:
        return document(self.text, self.source_id)


def make_document(number: int) -> MarkedDocument:
    """All documents begin alike; a page of 256 tokens holds six marks or more."""
    chance = random.Random(number)
    marks = tuple(f"{chance.getrandbits(64):016x}" for _ in range(chance.randint(8, 40)))
    filler = ("".join(chance.choices("abcdefgh .", k=chance.randint(1, 24))) for _ in marks)
    parts = (f"{words}[{mark}]" for words, mark in zip(filler, marks, strict=True))
    return MarkedDocument(number, marks, "a document: " + "".join(parts))


def next_state(state: int, token: int) -> int:
    return (31 * state + token) % 65536


def state_after(tokens: Iterable[int]) -> int:
    state = 7
    for token in tokens:
        state = next_state(state, token)
    return state


@lru_cache(maxsize=64)
def spelled(prompt: bytes) -> bytes:
    """The mark whose number a prompt ends with, as far as it can be read."""
    marks, asked = MARK.findall(prompt), re.search(rb"(\d+)$", prompt)
    found = asked is not None and int(asked[1]) < len(marks)
    return marks[int(asked[1])] + b"#" if found else bytes([UNREADABLE])


def next_token(text: bytes, state: int) -> int:
    """Go on behind the question mark, the first one of a text."""
    prompt, _, written = text.partition(b"?")
    mark = spelled(prompt)
    if len(written) < len(mark):
        return mark[len(written)]
    return b"0123456789abcdef"[state % 16] if len(written) < len(mark) + 4 else STOP


def following(tokens: Sequence[int]) -> list[int]:
    """The rest of an answer, its end included."""
    text, state = bytes(tokens), state_after(tokens)
    while (token := next_token(text, state)) != STOP:
        text += bytes([token])
        state = next_state(state, token)
    return [*text[len(tokens) :], STOP]


def answer_to(prompt: str) -> str:
    """The whole answer, by the prompt alone."""
    return bytes(following(prompt.encode())[:-1]).decode()


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


class MarkReader:
    """A hybrid toy: predicts from pages of both forms, and from a state; remembers no step."""

    compute_dtype = torch.float32
    is_recurrent = True
    kv_layout = KVLayout.uniform(1, 1, HEAD_DIM, torch.float32)
    context_tokens = 1 << 20
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self._states: dict[int, int] = {}
        self._tapes: dict[int, list[int]] = {}

    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        start, wanted = 0, list[int]()
        for rows in batch.sequences:
            ids = batch.token_ids[start : start + rows.num_rows]
            start += rows.num_rows
            codes = code_of(ids).unsqueeze(1)
            pages.exact.write(0, rows.pages, rows.committed - rows.num_packed, codes, -codes)
            parents = rows.parents or range(-1, rows.num_rows - 1)
            tape = self._tapes[rows.slot] = self._run(rows.slot, ids.tolist(), parents)
            if rows.logit_rows:
                text = self._read(rows, pages)
                before, own = text[: rows.committed], text[rows.committed :]
                for row in rows.logit_rows:
                    path = bytes(own[at] for at in path_to(row, parents))
                    wanted.append(next_token(before + path, tape[row]))
        return one_hot(wanted, VOCAB_SIZE)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self._states[slot] = self._tapes.pop(slot)[path[-1]]

    def reset(self, slot: int) -> None:
        self._states[slot] = state_after(())

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        return (torch.tensor(self._states[slot]),)

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        self._states[slot] = int(state[0])

    def _run(self, slot: int, ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        tape: list[int] = []
        for token, parent in zip(ids, parents, strict=True):
            tape.append(next_state(tape[parent] if parent >= 0 else self._states[slot], token))
        return tape

    def _read(self, rows: SequenceRows, pages: KVPages) -> bytes:
        """The text of a sequence, where keys and values agree on it."""
        num_tokens = rows.committed + rows.num_rows
        read = pages.in_order(0, rows.pages, rows.packed_pages)
        keys, values = (x[:, 0].reshape(-1, HEAD_DIM)[:num_tokens] for x in read)
        ids = token_of(keys)
        is_text = (ids == token_of(-values)) & (ids < 256)
        return torch.where(is_text, ids, UNREADABLE).to(torch.uint8).numpy().tobytes()
