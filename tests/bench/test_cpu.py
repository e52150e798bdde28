"""`bench cpu`: both engines get the same work, and the figures are of that work."""

import pytest

from ragflash.bench import cpu, peer
from ragflash.bench.record import summarise
from ragflash.gguf.reader import GGUFFile
from ragflash.models.registry import load_model
from tests.models.test_llama import forward, poisoned_pages
from tests.tiny import write_tiny_llama

SIZES = cpu.Sizes(prefill=20, decode=3, depth=50)


class Recorder:
    """An engine that notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def forward(self, token_ids, committed):
        self.calls.append((tuple(token_ids), committed))
        return 7


def test_two_engines_do_the_same_work_in_pairs():
    ours, theirs = Recorder(), Recorder()
    series = cpu.measure_speed(ours.forward, theirs.forward, SIZES, 7, lambda *_: None)
    assert ours.calls == theirs.calls
    summary = summarise(series)
    for name in ("prefill", "decode", "decode_deep"):
        assert summary[name]["ratio"]["to"] == f"{name}_llama_cpp"
        assert summary[name]["n"] == 7
    prompts = [call for call in ours.calls if len(call[0]) == 20 and call[1] == 0]
    assert len(prompts) == 8 + 1  # seven and one before them, and the first piece of the depth
    assert ((7,), 52) in ours.calls  # the last of three tokens after fifty
    assert max(committed for _, committed in ours.calls) == 52


def test_alone_there_are_no_ratios():
    series = cpu.measure_speed(Recorder().forward, None, SIZES, 7, lambda *_: None)
    assert series.keys() == {"prefill", "decode", "decode_deep"}
    assert all("ratio" not in figures for figures in summarise(series).values())


def test_what_is_timed_is_the_model(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=1)
    with GGUFFile.open(path) as file:
        model = load_model(file, dtype="float32")
    ours = cpu._Ours(model, 300).forward
    tokens = [index % 90 for index in range(270)]
    logits = forward(model, poisoned_pages(model), [(tokens, 0, (3, 1))])
    assert ours(tokens[:200], 0) == logits[199].argmax()
    assert ours(tokens[200:], 200) == logits[269].argmax()


@pytest.mark.slow
def test_a_packaged_model_is_measured_whole(packaged_model_path, monkeypatch):
    monkeypatch.setattr(peer, "is_installed", lambda: False)
    sizes = cpu.Sizes(prefill=16, decode=2, depth=16)
    measurement = cpu.measure(
        packaged_model_path, threads=1, pairs=7, progress=lambda *_: None, sizes=sizes
    )
    summary = summarise(measurement.series)
    kv_bytes = 8192 * 30 * 2 * 3 * 64 * 4
    assert kv_bytes < summary["engine_rss_bytes"]["median"] < 4 * kv_bytes
    assert measurement.parameters["context_tokens"] == 8192
    assert len(measurement.model["sha256"]) == 64
