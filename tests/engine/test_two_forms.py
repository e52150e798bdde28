"""Old keys and values are packed: every way to a token reads the same numbers.

`ReaderModel` predicts from all bits that a row reads, so a page in the wrong form, place or
order shows as a wrong token; `Oracle` knows them from positions alone.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from ragflash.engine.constraint import Free, Literal
from ragflash.engine.request import (
    Finished,
    GenerateRequest,
    ScoreRequest,
)
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.grid import Grid
from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.kvcache.table import PageConversion
from ragflash.models.contract import ForwardBatch
from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from tests.engine.harness import ToyEngine, toy_engine
from tests.engine.toys import (
    ToyModel,
    ToyRecurrentModel,
    ask,
    byte_tokenizer,
    chain,
    document,
    paths_of,
    question,
    user,
)
from tests.engine.trees import wild_tree

TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
GRID = Grid(512)
HEAD_DIM = 32
TABLE = torch.randn(8192, HEAD_DIM, generator=torch.Generator().manual_seed(0))


def vectors(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens, `[T, 1, D]`; both depend on the position."""
    index = (ids * 31 + positions * 17) % len(TABLE)
    return TABLE[index].unsqueeze(1), TABLE[index - 1].unsqueeze(1)


def logits_of(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Logits that depend on every bit of `[T, D]`; the tokens are letters."""
    digest = hashlib.blake2b(keys.numpy().tobytes() + values.numpy().tobytes()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    logits = torch.full((VOCAB_SIZE,), -100.0)
    logits[97:123] = torch.randn(26, generator=generator)
    return logits


class ReaderModel(ToyModel):
    kv_layout = KVLayout.uniform(1, 1, HEAD_DIM, torch.float32)

    def __init__(self) -> None:
        super().__init__(lambda history: torch.empty(0), vocab_size=VOCAB_SIZE)

    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        self.steps.append({rows.slot: rows.num_rows for rows in batch.sequences})
        start, wanted = 0, []
        for rows in batch.sequences:
            at = slice(start, start + rows.num_rows)
            start += rows.num_rows
            keys, values = vectors(batch.token_ids[at], batch.positions[at])
            before = rows.committed - rows.num_packed
            pages.exact.write(0, rows.pages, before, keys, values)
            if rows.logit_rows:
                read = pages.in_order(0, rows.pages, rows.packed_pages)
                keys, values = (x[:, 0].reshape(-1, HEAD_DIM) for x in read)
                paths, before = paths_of(rows), [*range(rows.committed)]
                seen = [
                    [*before, *(rows.committed + other for other in paths[row])]
                    for row in rows.logit_rows
                ]
                wanted += [logits_of(keys[at], values[at]) for at in seen]
        return torch.stack(wanted) if wanted else torch.empty(0, VOCAB_SIZE)


class Oracle:
    """What a row must read, from its position and the tokens before it alone."""

    def __init__(self, kv_format: KVFormatName, grid: Grid = GRID) -> None:
        self._format = KvFormat(kv_format)
        self._grid = grid
        self._pages: dict[bytes, torch.Tensor] = {}

    def logits(self, history: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(history)
        both = vectors(ids, torch.arange(len(ids)))
        end = 256 * (1 + self._grid.num_packed(len(ids) - 1))
        keys, values = (
            torch.cat((x[:256, 0], self._packed(x[256:end, 0]), x[end:, 0])) for x in both
        )
        return logits_of(keys[: len(ids)], values[: len(ids)])

    def next_token(self, history: Sequence[int]) -> int:
        return int(self.logits(history).argmax())

    def answer(self, prompt: str, num_tokens: int) -> tuple[int, ...]:
        return tuple(chain(self.next_token)([*prompt.encode()], num_tokens))

    def logprob(self, prompt: str, target: str) -> float:
        history, total = [*prompt.encode()], 0.0
        for token in target.encode():
            total += float(torch.log_softmax(self.logits(history), dim=-1)[token])
            history.append(token)
        return total

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x
        key = x.numpy().tobytes()
        if key not in self._pages:
            encoded = encode_pages(x.view(-1, 1, 256, HEAD_DIM), self._format)
            decoded = decode_pages(encoded, self._format, page_tokens=256, head_dim=HEAD_DIM)
            self._pages[key] = decoded.reshape(-1, HEAD_DIM)
        return self._pages[key]


def text_of(length: int, salt: str = "") -> str:
    return "".join(random.Random(f"{length}{salt}").choices("abcdefgh \n", k=length))


def count_conversions(engine: ToyEngine) -> Counter[int]:
    """Count how often each packed page is written, from now on."""
    packed, counts = engine.pages.packed, Counter[int]()
    assert packed is not None
    encode = packed.encode

    def counting(exact, conversions: Sequence[PageConversion]) -> None:
        counts.update(conversion.packed for conversion in conversions)
        encode(exact, conversions)

    packed.encode = counting
    return counts


def shuffle_pages(engine: ToyEngine) -> None:
    """Let the next pages come in any order."""
    for allocator in (engine.allocators.exact, engine.allocators.packed):
        random.Random(5).shuffle(allocator._free)


# Prompts that end, or whose answers pass, around the edges of pages and blocks.
CASES = [("q8_0", length) for length in (255, 511, 1016, 1023, 1024, 1025, 1280, 1530)]


@pytest.mark.parametrize(("kv_format", "length"), [*CASES, ("tq3_0", 1023), ("tq3_0", 1537)])
def test_cold_warm_and_drafted_answers_read_what_positions_say(kv_format, length):
    oracle = Oracle(kv_format)
    shown = document(text_of(length - 8), "d")

    def asked(at: int) -> GenerateRequest:
        return ask(f"{at}{at + 1}{at + 2}what?", shown, max_tokens=14)

    wanted = [oracle.answer(f"{shown.text}{at}{at + 1}{at + 2}what?", 14) for at in range(2)]

    def draft(history: Sequence[int], budget: int) -> list[int]:
        """Right but for every fourth token."""
        found = chain(oracle.next_token)(history, min(budget, 6))
        return [97 if (len(history) + i) % 4 == 0 else token for i, token in enumerate(found)]

    trees = wild_tree(lambda history: chain(oracle.next_token)(history, 6), VOCAB_SIZE, length)
    for options in ({}, {"draft": draft}, {"draft": trees}, {"chunk_tokens": 64}):
        with toy_engine(ReaderModel(), TOKENIZER, kv_format=kv_format, **options) as engine:
            shuffle_pages(engine)
            conversions = count_conversions(engine)
            cold, warm, again = (engine.complete(asked(at)) for at in (0, 1, 0))
            assert (cold.token_ids, warm.token_ids, again.token_ids) == (*wanted, wanted[0])
            assert cold.usage.cached_tokens == 0
            assert warm.usage.cached_tokens == again.usage.cached_tokens == length - 8
            stored = GRID.num_packed(length - 8)
            in_all = GRID.num_packed(length + 14 - 1)
            assert sum(conversions.values()) == stored + 3 * (in_all - stored)
            engine.assert_pages_are_accounted_for()


def test_tokens_computed_one_by_one_leave_the_same_pages():
    oracle, shown = Oracle("tq3_0"), document(text_of(1300), "d")
    wanted = oracle.answer(f"{shown.text}?", 3)
    with toy_engine(ReaderModel(), TOKENIZER, kv_format="tq3_0", chunk_tokens=1) as engine:
        assert engine.complete(ask("?", shown, max_tokens=3)).token_ids == wanted
        assert all(rows == {0: 1} for rows in map(dict, engine.runner._model.steps))


def test_no_forward_crosses_an_edge():
    with toy_engine(ReaderModel(), TOKENIZER, kv_format="q8_0", chunk_tokens=700) as engine:
        engine.complete(ask(text_of(1600), max_tokens=2))
        assert [rows[0] for rows in engine.runner._model.steps] == [512, 512, 512, 64, 1]


@pytest.mark.parametrize(
    ("length", "num_free", "steps"),
    [(1020, 0, [512, 512, 20, 1, 1]), (1010, 4, [512, 498, 1, 1, 1, 11, 14, 1, 1])],
)
def test_forced_text_passes_an_edge(length, num_free, steps):
    """Text that a constraint forces is computed up to the edge, then the rest."""
    oracle, prompt, forced = Oracle("q8_0"), text_of(length), "forced text, long enough"
    free = (Free(max_tokens=num_free),) if num_free else ()
    constraint = (*free, Literal(forced), Free(max_tokens=3))
    request = ask(prompt, max_tokens=40, constraint=constraint)
    first = oracle.answer(prompt, num_free)
    wanted = (*first, *forced.encode(), *oracle.answer(prompt + bytes(first).decode() + forced, 3))
    with toy_engine(ReaderModel(), TOKENIZER, kv_format="q8_0") as engine:
        assert engine.complete(request).token_ids == wanted
        assert [rows[0] for rows in engine.runner._model.steps] == steps


def test_stored_segments_make_room_in_both_pools():
    oracle = Oracle("q8_0")
    with toy_engine(
        ReaderModel(), TOKENIZER, kv_format="q8_0", num_pages=16, num_packed_pages=5
    ) as engine:
        for at in (0, 1, 2, 0, 3, 3):
            shown = document(text_of(1550, str(at)), f"d{at}")
            finished = engine.complete(ask("?", shown, max_tokens=4))
            assert finished.token_ids == oracle.answer(f"{shown.text}?", 4)
        assert finished.usage.cached_tokens == 1550
        assert engine.store.num_evicted >= 3
        engine.assert_pages_are_accounted_for()


def test_many_sequences_read_their_own_pages():
    oracle, shown = Oracle("tq4"), document(text_of(1200), "d")
    requests = [ask(f"{at} {text_of(40 * at)}?", shown, max_tokens=20) for at in range(5)]
    with toy_engine(ReaderModel(), TOKENIZER, kv_format="tq4", chunk_tokens=128) as engine:
        for at, finished in enumerate(engine.complete_all(requests)):
            prompt = f"{shown.text}{at} {text_of(40 * at)}?"
            assert finished.token_ids == oracle.answer(prompt, 20)
        engine.assert_pages_are_accounted_for()


def test_a_request_gets_all_pages_that_there_are_and_no_more():
    with toy_engine(
        ReaderModel(), TOKENIZER, kv_format="q8_0", num_pages=5, num_packed_pages=1
    ) as engine:
        assert engine.allocators.most_tokens == 1535
        finished = engine.complete(ask(text_of(1525), max_tokens=1000))
        assert len(finished.token_ids) == 10
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("length", [500, 1022, 1500])
def test_targets_are_scored_across_an_edge(length):
    """The second target begins where the first did, whatever that left in the cache."""
    oracle, prompt = Oracle("q8_0"), text_of(length)
    targets = ("first target of some length", "second " * 5, "no", "x" * 40)
    with toy_engine(ReaderModel(), TOKENIZER, kv_format="q8_0", chunk_tokens=512) as engine:
        request = ScoreRequest("s", user(question(prompt)), targets)
        *_, scored, finished = engine.events(request)
        wanted = [oracle.logprob(prompt, target) for target in targets]
        assert scored.logprobs == pytest.approx(wanted, abs=1e-4)
        assert isinstance(finished, Finished)
        engine.assert_pages_are_accounted_for()


def test_targets_longer_than_a_step_are_scored_from_one_state():
    def scores(chunk_tokens: int, *targets: str, **options) -> tuple[float, ...]:
        model = ToyRecurrentModel(vocab_size=VOCAB_SIZE)
        shown = document(text_of(300), "d")
        request = ScoreRequest("s", user(shown, question("what?")), targets)
        with toy_engine(model, TOKENIZER, chunk_tokens=chunk_tokens, **options) as engine:
            return asyncio.run(engine.client.score(request)).logprobs

    targets = ("abcdefgh", "ijklmno", "p", "qrstuv")
    assert scores(5, *targets, score_tokens=3) == scores(512, *targets)
    assert scores(512, *targets) == tuple(scores(512, target)[0] for target in targets)
