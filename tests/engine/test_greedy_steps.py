"""Tokens chosen where the model runs are those that the engine chooses from logits."""

import string
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from ragflash.engine.constraint import Choice, Free
from ragflash.engine.placed import Placed
from ragflash.engine.request import (
    Delta,
    DraftMode,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    ScoreRequest,
)
from ragflash.engine.step_costs import measure_step_costs
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.allocator import PageAllocator
from ragflash.kvcache.grid import PageAllocators
from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.contract import GreedyModel
from ragflash.models.device.model import DeviceModel
from ragflash.models.registry import load_records
from ragflash.speculative.drafter import Draft
from tests.engine.harness import ToyEngine, toy_engine
from tests.engine.toys import END, TURN, ToyTokenizer, ask
from tests.models.families import FAMILIES
from tests.models.toy_files import write_gguf

NUM_PAGES = 6
CHARACTERS = [letter.encode() for letter in " " + string.printable[:89]]
# Four tokens fewer than the model has columns of logits.
TOKENIZER = ToyTokenizer(CHARACTERS, controls=(END, TURN), stop=(END,))


class PlacedModel(DeviceModel):
    """A model with its pages."""

    placed: tuple[KVPages, PageAllocators]


class LogitsOnly:
    """A model that does not choose."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def __getattr__(self, name: str):
        if name == "forward_greedy":
            raise AttributeError(name)
        return getattr(self._model, name)


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def path(request, tmp_path_factory):
    family = FAMILIES[request.param]
    tensors = family.tensors(family.build(seed=2))
    return write_gguf(
        tmp_path_factory.mktemp("toy") / "toy.gguf", family.architecture, family.metadata, tensors,
        quantized=True,
    )  # fmt: skip


@contextmanager
def engine_of(path, *, chooses: bool, **options) -> Iterator[ToyEngine]:
    with GGUFFile.open(path) as file:
        decoder = load_records(file, torch.device("cpu"))
    pages = KVPages(PagePool(decoder.kv_layout, NUM_PAGES))
    model = PlacedModel(
        decoder, torch.device("cpu"), pages, num_tokens=TOKENIZER.vocab_size, max_slots=4,
        exact_pages=NUM_PAGES, packed_pages=0, chunk_tokens=512, dtype=torch.float32,
    )  # fmt: skip
    model.placed = pages, PageAllocators(PageAllocator(NUM_PAGES))
    shown = model if chooses else LogitsOnly(model)
    with toy_engine(shown, TOKENIZER, **options) as engine:
        yield engine


def requests() -> list[GenerateRequest]:
    """One of every kind."""
    plain = ask("tell me", max_tokens=8)
    changes = [
        {},
        {"sampling": SamplingParams(repetition_penalty=1.3)},
        {"sampling": SamplingParams(presence_penalty=0.5, frequency_penalty=0.1)},
        {"sampling": SamplingParams(logit_bias=((5, 8.0),))},
        {"sampling": SamplingParams(temperature=0.8, top_k=5, seed=3)},
        {"logprobs": True, "top_logprobs": 2},
        {"constraint": Choice(("yes", "no", "not said"))},
        {"constraint": Free("!")},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 0},
        {"stop": ("e", "t")},
        {"draft": DraftMode.OFF},
    ]
    return [replace(plain, id=f"r{at}", **change) for at, change in enumerate(changes)]


def answers(finished):
    return [(one.token_ids, one.text, one.reason, one.logprobs) for one in finished]


def test_the_model_is_found_to_choose(path):
    with engine_of(path, chooses=True) as engine:
        assert isinstance(engine.runner._model, GreedyModel)
    with engine_of(path, chooses=False) as engine:
        assert not isinstance(engine.runner._model, GreedyModel)


def test_every_kind_of_request_gets_the_same_answer(path):
    with engine_of(path, chooses=False) as engine:
        expected = answers(map(engine.complete, requests()))
    with engine_of(path, chooses=True) as engine:
        assert answers(map(engine.complete, requests())) == expected
        engine.assert_pages_are_accounted_for()


@pytest.mark.parametrize("chooses", [False, True])
def test_plain_decoding_is_timed_as_it_runs(path, chooses):
    with engine_of(path, chooses=chooses) as engine:
        model = engine.runner._model
        pages, allocators = model.placed
        placed = Placed(model, pages, allocators, "cpu", "float32", lambda: None)
        expected = answers(map(engine.complete, requests()[:1]))
        costs = measure_step_costs(placed, most_rows=2)
        assert answers(map(engine.complete, requests()[:1])) == expected
    before = costs.ahead_ms(0)
    assert 0 < before <= costs.step_ms(1, 0)
    costs.observe(1, 0, 2 * costs.step_ms(1, 0))
    assert (costs.ahead_ms(0) == before) == chooses, "else plain decoding is such steps"


def test_events_are_sent_while_the_model_computes(path, monkeypatch):
    gate, told = threading.Event(), []
    with engine_of(path, chooses=True, gate=gate) as engine:
        _, events = engine.submit(requests()[0])
        forward = engine.runner._greedy.forward_greedy

        def watched(batch, pages, *, meanwhile, **options):
            before = len(events)

            def tell():
                meanwhile()
                told.append(len(events) - before)

            return forward(batch, pages, meanwhile=tell, **options)

        monkeypatch.setattr(engine.runner._greedy, "forward_greedy", watched)
        gate.set()
        while not (events and isinstance(events[-1], Finished)):
            time.sleep(0.01)
    assert sum(told[1:]) >= len(told) - 2, "all but the last are sent by the step after"
    assert "".join(event.text for event in events if isinstance(event, Delta)) == events[-1].text


def test_requests_of_two_kinds_run_together(path):
    some = requests()[:2]
    with engine_of(path, chooses=True) as engine:
        expected = answers(map(engine.complete, some))
        assert answers(engine.complete_all(some)) == expected


@pytest.mark.parametrize("goes_on", [False, True])
def test_drafts_change_nothing(path, goes_on):
    """Steps with drafts are not begun early, those between only if none is expected: wrongly."""
    request = ask("again and again", max_tokens=16)
    with engine_of(path, chooses=True) as engine:
        expected = engine.complete(request).token_ids

    def propose(history, budget):
        if len(history) % 3:
            return Draft((), "stub", goes_on=goes_on)
        done = len(history) - len("again and again")
        return Draft((*expected[done : done + 2], 1, 2), "stub").first(budget)

    with engine_of(path, chooses=True, draft=propose) as engine:
        finished = engine.complete(replace(request, draft=DraftMode.AUTO))
    assert finished.token_ids == expected
    assert finished.timings.draft_n_accepted > 0


def test_targets_are_scored_as_before(path):
    request = ScoreRequest("s", ask("is it so?").messages, targets=("yes", "no", "perhaps"))
    scores = []
    for chooses in (False, True):
        with engine_of(path, chooses=chooses) as engine:
            engine.complete(ask("is it", max_tokens=5))
            _, events = engine.submit(request)
            while not events or events[-1].__class__.__name__ != "Finished":
                assert engine.worker.is_alive
            scores.append(events[-2].logprobs)
    assert scores[0] == scores[1]


def test_a_cancelled_answer_leaves_the_next_one_alone(path):
    with engine_of(path, chooses=True) as engine:
        expected = engine.complete(ask("what next?", max_tokens=9)).token_ids
        job, events = engine.submit(ask("what now?", max_tokens=2000))
        while not events:
            assert engine.worker.is_alive
        job.cancelled.set()
        finished = engine.complete(ask("what next?", max_tokens=9))
        assert finished.token_ids == expected
        assert finished.reason is FinishReason.LENGTH
        engine.assert_pages_are_accounted_for()
