"""llama.cpp's lookups: with a library that is made up, since the real one may be absent."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from ragflash.bench import draft_peer, drafting, peer
from ragflash.bench.draft_tasks import TASKS, Sizes
from ragflash.bench.record import summarise
from ragflash.errors import EngineError
from tests.models.families import FAMILIES
from tests.models.toy_files import write_toy

PROSE = "Seals are replaced every year; the pressure is kept at 16 bar. " * 60
SIZES = Sizes(output_tokens=dict.fromkeys(TASKS, 7), question_tokens=250, list_rows=3)
END = 99


class Lookup:
    """Proposes as many tokens as it is told, of which two hold."""

    def __init__(self, num_pred_tokens):
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids):
        return np.arange(self.num_pred_tokens, dtype=np.intc)


class Llama:
    """Writes a token a step, or three where something was proposed; ends after `length`."""

    length = 50
    made: ClassVar[list["Llama"]] = []

    def __init__(self, *, draft_model, n_ctx, **options):
        self.draft_model, self.n_ctx, self.options = draft_model, n_ctx, options
        self.prompts = []
        Llama.made.append(self)

    def token_eos(self):
        return END

    def generate(self, tokens, *, temp):
        assert temp == 0.0
        self.prompts.append(tokens)
        left = self.length
        count = 1
        while left:
            for _ in range(min(count, left)):
                left -= 1
                yield left or END
            if self.draft_model is not None:
                assert len(self.draft_model(np.arange(4, dtype=np.intc))) in {2, 10}
                count = 3

    def close(self):
        self.is_closed = True


@pytest.fixture
def library(monkeypatch):
    Llama.made = []
    module = SimpleNamespace(Llama=Llama)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    lookups = SimpleNamespace(LlamaPromptLookupDecoding=Lookup)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", lookups)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("made") / "toy.gguf", FAMILIES["llama"])


@pytest.mark.usefixtures("library")
def test_every_kind_answers_the_same_prompt_as_often(toy):
    row, series = draft_peer.measure_peer(toy, PROSE, SIZES, "copy", 600, threads=2)
    summary = summarise(series)
    for mode in ("lookup10", "lookup2"):
        assert summary[f"peer_copy_600_{mode}_tok_s"]["ratio"]["to"] == "peer_copy_600_off_tok_s"
        assert summary[f"peer_copy_600_{mode}_tok_s"]["n"] == 7
        assert summary[f"peer_copy_600_{mode}_tokens_per_step"]["median"] == 6 / 2
    assert row["output_tokens"] == 7
    assert row["same_output"] == {"off": True, "lookup10": True, "lookup2": True}
    prompts = [prompt for llama in Llama.made for prompt in llama.prompts]
    assert len(prompts) == 3 * 8
    assert prompts.count(prompts[0]) == len(prompts)
    assert 350 < len(prompts[0]) <= 600
    for llama in Llama.made:
        assert llama.n_ctx > len(prompts[0]) + 7 + 10
        assert llama.options["n_threads"] == 2
        assert llama.is_closed


@pytest.mark.usefixtures("library")
def test_an_answer_that_ends_at_once_is_not_timed(toy, monkeypatch):
    monkeypatch.setattr(Llama, "length", 1)
    with pytest.raises(EngineError, match="ended its answer at once"):
        draft_peer.measure_peer(toy, PROSE, SIZES, "free", 600, threads=1)
    assert all(llama.is_closed for llama in Llama.made)


def test_without_the_library_a_word_says_so(toy, monkeypatch):
    monkeypatch.setattr(peer, "is_installed", lambda: False)
    told = []
    plan = drafting.Plan(prose=PROSE, rows=(), sizes=SIZES, peer=toy)
    found = drafting.measure(plan, pytest.fail, lambda what, *_: told.append(what))
    assert told == ["llama-cpp-python is not installed, so there is nothing beside"]
    assert "peer_rows" not in found.parameters


@pytest.mark.usefixtures("library")
def test_rows_of_the_peer_are_kept_and_gone_on_with(toy, monkeypatch):
    monkeypatch.setattr(peer, "is_installed", lambda: True)
    kept = []
    plan = drafting.Plan(prose=PROSE, rows=(), sizes=SIZES, peer=toy)
    monkeypatch.setattr(draft_peer, "measure_peer", lambda *given: ({"task": given[3]}, {}))
    drafting.measure(plan, pytest.fail, lambda *_: None, kept.append)
    assert kept == []  # nothing is selected
    plan = drafting.Plan(prose=PROSE, rows=drafting.QUICK, sizes=SIZES, peer=toy)
    found = drafting._Found(plan, None)
    found.peer_rows["copy", 1024] = {"task": "copy"}
    drafting._measure_peer(found, plan, lambda *_: None, kept.append)
    assert [row["task"] for row in kept[0].parameters["peer_rows"]] == ["copy", "free"]
    assert len(kept) == 1
