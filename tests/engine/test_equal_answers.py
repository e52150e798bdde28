"""The same answer whoever drafts: every source, architecture, format and kind of request.

Blocks and drafters with random weights guess nothing, so what they propose is set right in three
of four places: drafts are accepted, in part, and all that follows from that happens.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ragflash.engine.client import EngineClient
from ragflash.engine.constraint import Grammar, GrammarDialect, QuoteFrom, Quoting
from ragflash.engine.request import DraftCount, DraftMode, Finished, SamplingParams
from ragflash.engine.row_drafters import DrafterOptions
from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.speculative.dflash import DFlashDrafter
from ragflash.speculative.mtp import MtpDrafter
from tests.engine.drafted import request, start, write_drafter, write_target, write_with_mtp
from tests.engine.toys import StubDrafter
from tests.engine.trees import wild_tree
from tests.models.families import FAMILIES
from tests.models.forwards import batch_of, load, poisoned_pages
from tests.models.toy_files import TOKENS

DOCUMENT = 'Seals: 16 bar. {"name": "seal", "pages": [1, 2], "sure": true} Seals last a year. ' * 2
LONG_DOCUMENT = DOCUMENT * 5  # the second page is packed before an answer begins
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "pages": {"type": "array", "items": {"enum": [1, 2, 16]}, "maxItems": 2},
        "sure": {"enum": ["yes", "no", None, True]},
    },
    "required": ["name", "pages", "sure"],
    "additionalProperties": False,
}
PENALTIES = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=-0.3)
SAMPLED = SamplingParams(temperature=0.9, seed=3, top_p=0.95, frequency_penalty=0.2)
QUOTED = QuoteFrom(("manual",))
WRITE_JSON = {
    "constraint": Grammar(GrammarDialect.JSON_SCHEMA, json.dumps(SCHEMA)),
    "max_tokens": 60,
}
REPEAT = {"sampling": SamplingParams(frequency_penalty=-1.0), "max_tokens": 40}
TASKS = (
    {},
    WRITE_JSON,
    REPEAT,
    {"constraint": Quoting(QUOTED, max_tokens=6), "sampling": SAMPLED, "max_tokens": 30},
    {"constraint": QUOTED},
    {"stop": ("e", "rs"), "sampling": SAMPLED},
    {"sampling": PENALTIES},
    {"logprobs": True, "top_logprobs": 2, "sampling": SAMPLED},
    {"max_tokens": 1},
    {"max_tokens": 3},
)


@dataclass
class Truth:
    """What is to come in the answer that is being drafted for."""

    tokens: Sequence[int] = ()

    def after(self, history: Sequence[int]) -> Sequence[int]:
        return self.tokens[len(history) :]

    def mend(self, history: Sequence[int], guessed: Sequence[int]) -> tuple[int, ...]:
        """Set three of four guesses right."""
        mended, first = [*guessed], len(history)
        for at, token in enumerate(self.after(history)[: len(mended)]):
            if (first + at) % 4:
                mended[at] = token
        return tuple(mended)


@dataclass
class Bench:
    """Engines of one model file, started when they are first wanted, and what is asked of them."""

    path: Path
    drafter: Path
    truth: Truth
    stack: ExitStack
    document: str = DOCUMENT
    tasks: Sequence[dict[str, object]] = TASKS
    options: dict[str, object] = field(default_factory=dict)
    engines: dict[str, EngineClient] = field(default_factory=dict)
    expected: list[Finished] = field(default_factory=list)
    stub: StubDrafter | None = None

    def engine(self, kind: str) -> EngineClient:
        if kind not in self.engines:
            options = {
                "stub": {"drafter_factory": lambda _: self.stub},
                "lookup": {"drafts": True, "row_drafters": DrafterOptions(mtp=False)},
                "rows": {"drafts": True, "row_drafters": DrafterOptions(file=self.drafter)},
            }[kind]
            self.engines[kind] = self.stack.enter_context(
                start(self.path, **options, **self.options)
            )
        return self.engines[kind]

    def ask(self, kind: str, number: int, mode: DraftMode) -> Finished:
        engine = self.engine(kind)
        asked = request(document=self.document, draft=mode, **self.tasks[number])
        prompt = engine._prepare(asked, lambda _: None, 0.0).prompt.token_ids
        known = self.expected[number].token_ids if mode is not DraftMode.OFF else ()
        self.truth.tokens = (*prompt, *known)
        return asyncio.run(engine.complete(asked))

    def plain(self, number: int) -> Finished:
        while len(self.expected) <= number:
            self.expected.append(self.ask("stub", len(self.expected), DraftMode.OFF))
        return self.expected[number]


COPIES = {"lookup", "lookup_output"}
LETTERS = [TOKENS.index(letter) for letter in "abcde"]
CRITICAL = 45.31  # chi-square at p = 0.001 with 20 degrees of freedom: 5 letters, 5 after each
SOURCES: dict[str, tuple[str, DraftMode, set[str]]] = {  # engine, mode, who may draft
    "chain": ("stub", DraftMode.AUTO, {"stub"}),
    "tree": ("stub", DraftMode.AUTO, {"wild"}),
    "lookup": ("lookup", DraftMode.LOOKUP, COPIES),
    "lookup tree": ("lookup", DraftMode.TREE, COPIES),
    "mtp": ("rows", DraftMode.MTP, {"mtp"}),
    "dflash": ("rows", DraftMode.DFLASH, {"dflash"}),
    "dflash tree": ("rows", DraftMode.TREE, {"dflash", *COPIES}),
    "mixed": ("rows", DraftMode.AUTO, {"mtp", "dflash", *COPIES}),
}


@pytest.fixture(scope="module")
def truth() -> Iterator[Truth]:
    """Set drafters' guesses right, for as long as the engines live."""
    truth, patch = Truth(), pytest.MonkeyPatch()
    propose, candidates = MtpDrafter.propose, DFlashDrafter.candidates

    def proposed(self, history, budget):
        draft = propose(self, history, budget)
        return replace(draft, token_ids=truth.mend(history, draft.token_ids))

    def found(self, history, width, top_k=1):
        found = candidates(self, history, width, top_k)
        if found is None:
            return None
        chain = truth.mend(history, found.chain)
        token_ids = found.token_ids.clone()
        token_ids[:, 0] = token_ids.new_tensor(chain)
        return replace(found, token_ids=token_ids, chain=chain)

    patch.setattr(MtpDrafter, "propose", proposed)
    patch.setattr(DFlashDrafter, "candidates", found)
    yield truth
    patch.undo()


@pytest.fixture(scope="module")
def bench(truth, tmp_path_factory) -> Iterator[Callable[..., Bench]]:
    folder = tmp_path_factory.mktemp("toys")
    drafter, made = write_drafter(folder / "drafter"), dict[str, Bench]()
    with ExitStack() as stack:

        def bench(name: str, kv_format: str = "auto") -> Bench:
            path, key = folder / f"{name}.gguf", f"{name} {kv_format}"
            if not path.exists():
                write = write_with_mtp if name.startswith("qwen35") else write_target
                write(path, name)
            if key not in made:
                made[key] = Bench(path, drafter, truth, stack)
                if kv_format != "auto":
                    made[key].document, made[key].tasks = LONG_DOCUMENT, (REPEAT, WRITE_JSON)
                    made[key].options = {"kv_format": kv_format, "grid_tokens": 256}
            return made[key]

        yield bench


@pytest.fixture(scope="module")
def memoryless(truth, tmp_path_factory) -> Iterator[Bench]:
    """A model in which a token alone decides what follows it, asked to write five letters."""
    folder = tmp_path_factory.mktemp("memoryless")
    path, drafter = write_with_mtp(folder / "toy", is_right=True), write_drafter(folder / "drafter")
    bias = tuple((token, 50.0) for token in LETTERS)
    tasks = [
        {"sampling": SamplingParams(temperature=1.0, seed=at, logit_bias=bias), "max_tokens": 60}
        for at in range(15)
    ]
    with ExitStack() as stack:
        yield Bench(path, drafter, truth, stack, tasks=tasks)


def chain(truth: Truth) -> StubDrafter:
    return StubDrafter(lambda history, budget: truth.mend(history, [0] * min(budget, 7)))


def tree(truth: Truth) -> StubDrafter:
    return StubDrafter(wild_tree(truth.after, len(TOKENS)))


def assert_equal(found: Finished, plain: Finished) -> None:
    """All that a reply says of its text is the same; rows side by side round differently."""
    for name in ("token_ids", "text", "reason", "quotes", "num_shown"):
        assert getattr(found, name) == getattr(plain, name), name
    assert found.usage.completion_tokens == plain.usage.completion_tokens
    assert [token.chosen.token_id for token in found.logprobs] == [
        token.chosen.token_id for token in plain.logprobs
    ]
    for one, other in zip(found.logprobs, plain.logprobs, strict=True):
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
        assert [candidate.logprob for candidate in one.top] == pytest.approx(
            [candidate.logprob for candidate in other.top], abs=1e-4
        )


def assert_same_answers(here: Bench, name: str) -> list[Finished]:
    (kind, mode, permitted), counts, answers = SOURCES[name], list[DraftCount](), list[Finished]()
    if kind == "stub":
        here.stub = chain(here.truth) if name == "chain" else tree(here.truth)
    for number in range(len(here.tasks)):
        plain = here.plain(number)
        found = here.ask(kind, number, mode)
        assert_equal(found, plain)
        answers.append(found)
        counts += found.timings.drafts
    assert {count.source for count in counts} <= permitted
    drafted, accepted = (
        sum(getattr(count, what) for count in counts) for what in ("drafted", "accepted")
    )
    assert 0 < accepted < drafted
    return answers


def cases(firsts: Iterable[str], quick: dict[str, Sequence[str]]) -> list:
    return [
        pytest.param(first, name, marks=() if name in quick.get(first, ()) else pytest.mark.slow)
        for first in firsts
        for name in SOURCES
        if name != "mtp" or first not in FAMILIES or first.startswith("qwen35")
    ]


QUICK = {"qwen35": ("lookup tree", "mtp", "dflash tree", "mixed"), "gemma3": ("dflash",)}


@pytest.mark.parametrize(("family", "name"), cases(FAMILIES, QUICK))
def test_answers_are_the_same_whoever_drafts(bench, family, name):
    assert_same_answers(bench(family), name)


QUICK_FORMATS = {"q8_0": ("mtp",), "tq3_0": ("dflash tree",)}


@pytest.mark.parametrize(
    ("kv_format", "name"), cases(("q8_0", "q4_0", "tq4", "tq3_0"), QUICK_FORMATS)
)
def test_packed_keys_and_values_change_nothing_either(bench, kv_format, name):
    here = bench("qwen35", kv_format)
    assert_same_answers(here, name)
    assert here.expected[0].usage.prompt_tokens > 3 * PAGE_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SOURCES)
def test_sampled_answers_keep_their_distribution(memoryless, name):
    found = assert_same_answers(memoryless, name)
    followed = torch.zeros(len(TOKENS), len(TOKENS))
    for answer in found:
        for pair in pairwise(answer.token_ids):
            followed[pair] += 1
    followed = followed[LETTERS][:, LETTERS]
    assert followed.sum() == sum(len(answer.token_ids) - 1 for answer in found)
    model = load(memoryless.path)
    logits = []
    for letter in LETTERS:
        model.reset(0)
        logits.append(model.forward(batch_of([letter], 0), poisoned_pages(model))[0, LETTERS])
    expected = torch.stack(logits).softmax(dim=-1) * followed.sum(dim=-1, keepdim=True)
    assert float(((followed - expected).square() / expected).sum()) < CRITICAL
