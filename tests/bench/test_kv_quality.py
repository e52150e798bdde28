"""`model check`: what it feeds, what it counts, and that exact numbers lose nothing."""

import json
import math
from dataclasses import replace

import pytest
import torch

from ragflash.bench import kv_quality
from ragflash.bench.kv_quality import Quality, Sizes, best_format, check, make_probes
from ragflash.engine.host import HostOptions, place_on_host
from ragflash.engine.reading import Reading
from ragflash.errors import SettingInvalid
from ragflash.gguf.disk_cache import write_checked
from ragflash.gguf.reader import GGUFFile
from ragflash.models.known_formats import known_format, remember_format
from tests.bench.test_make_model import write_toy

SIZES = Sizes(contexts=(900,), codes=20, positions=40, grid_tokens=256)
PROSE = "Records are kept for seven years, and then destroyed by the keeper of the records. " * 9


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("made") / "toy.gguf")


def words_of(text):
    """One token a letter."""
    return [ord(char) for char in text]


def test_every_record_comes_twice_and_its_code_is_where_it_is_said_to_be():
    probes = [*make_probes(words_of, PROSE, 900, SIZES)]
    assert len(probes) > 1
    codes = []
    for probe in probes:
        text = "".join(map(chr, probe.tokens))
        assert len(text) == 900
        assert text.endswith(PROSE[:40])
        assert probe.prose == 900 - 40
        for start, end in probe.codes:
            assert probe.seen_again < start < end <= probe.prose
            assert text.index(text[start:end]) < probe.seen_again
            assert text.count(text[start:end]) == 2
            codes.append(text[start:end])
    assert len(codes) == len(set(codes)) == 20


def test_a_format_gets_a_row_at_every_length(toy):
    told = []
    found = check(
        toy,
        PROSE,
        formats=("q8_0", "tq3_0"),
        device="cpu",
        sizes=replace(SIZES, codes=4),
        progress=lambda *progress: told.append(progress),
    )
    rows = {row["kv_format"]: row for row in found["rows"]}
    assert rows.keys() == {"q8_0", "tq3_0"}
    for row in rows.values():
        assert abs(row["mean_kl"]) < 0.01, "a toy hardly minds"
        assert abs(row["tail_kl"]) < 0.01
        assert row["passes"] == (row["copied"] >= row["copied_exact"] - 0.02)
    assert rows["q8_0"]["num_codes"] == 4
    assert rows["q8_0"]["num_positions"] % 40 == 0
    assert found["best"] in {*rows, "f16"}
    assert len(found["sha256"]) == 64
    assert told[-1] == ("done", 3, 3)


def test_a_length_that_no_model_has_is_refused(toy):
    with pytest.raises(SettingInvalid, match="1024 tokens of context, 2000 are needed"):
        check(toy, PROSE, device="cpu", sizes=replace(SIZES, contexts=(2000,)))


def test_what_is_read_is_the_model(toy):
    tokens = [*range(40, 140)]
    host = HostOptions("float32", "dense", "auto", 512, 256, 1 << 30, 1)
    with GGUFFile.open(toy) as file:
        placed = place_on_host(file, host)
    whole = Reading(placed, 100)
    at_once = whole.feed(tokens).clone()
    whole.close()
    reading = Reading(placed, 100)
    pieces = [
        reading.feed(tokens[start : start + 25], num_draft=24).clone()
        for start in range(0, 100, 25)
    ]
    reading.close()
    torch.testing.assert_close(torch.cat(pieces), at_once, rtol=1e-4, atol=1e-4)
    assert placed.allocators.num_free == placed.allocators.num_pages


def test_codes_count_as_copied_when_every_token_was_likeliest(monkeypatch):
    probe = kv_quality.Probe(tuple(range(20)), codes=((10, 13), (14, 17)), seen_again=8, prose=18)

    class Parrot:
        """Says the next token, but a wrong one for place 15."""

        room, said = 64, 0

        def __init__(self, placed, num_tokens):
            assert num_tokens == 20

        def feed(self, part, *, num_draft, wants_logits):
            logits = torch.zeros(len(part), 32)
            for row, token in enumerate(part):
                logits[row, 0 if token == 14 else token + 1] = 9.0
            return logits if wants_logits else logits[:0]

        def close(self):
            pass

    monkeypatch.setattr(kv_quality, "Reading", Parrot)
    placed = type("Placed", (), {"device": "cpu"})()
    outcome = kv_quality._read(placed, probe)
    assert outcome.copied == (True, False)
    assert outcome.logprobs.shape == (2, 32)


def test_divergence_and_copies_are_compared_with_the_exact_ones():
    p, q = (torch.tensor(rows) for rows in ([[0.5, 0.5], [0.9, 0.1]], [[0.5, 0.5], [0.1, 0.9]]))
    exact = kv_quality._Outcome((True, True, False), p.log())
    found = kv_quality._Outcome((True, False, False), q.log())
    probe = kv_quality.Probe((1,), ((0, 1),) * 3, 0, 0)
    row = kv_quality._compare("q8_0", 7500, [probe], [exact], [found])
    far = 0.8 * math.log(9)
    assert row.mean_kl == pytest.approx(far / 2, rel=1e-6)
    assert row.tail_kl == pytest.approx(0.99 * far, rel=1e-6)
    assert (row.copied, row.copied_exact) == (1 / 3, 2 / 3)
    assert (row.num_codes, row.num_positions) == (3, 2)


def quality(kv_format, context_tokens, copied, mean_kl=0.001):
    return Quality(kv_format, context_tokens, mean_kl, 0.1, copied, 0.9, 200, 512)


def test_the_best_format_is_the_smallest_that_passes_everywhere():
    rows = [
        quality("q8_0", 7500, 0.9),
        quality("q8_0", 30_000, 0.89),
        quality("tq4", 7500, 0.881),
        quality("tq4", 30_000, 0.95),
        quality("tq3_0", 7500, 0.9),
        quality("tq3_0", 30_000, 0.87),
    ]
    assert best_format(rows) == "tq4"
    assert best_format([quality("q8_0", 7500, 0.1)]) == "f16"
    assert best_format([quality("tq3_0", 7500, 0.9, mean_kl=0.2)]) == "f16"


def test_what_was_measured_here_is_remembered(tmp_path):
    assert known_format("a" * 64, tmp_path) is None
    remember_format("a" * 64, "model.gguf", "tq4", tmp_path)
    remember_format("b" * 64, "other.gguf", "q8_0", tmp_path)
    assert known_format("a" * 64, tmp_path) == "tq4"
    assert known_format("a" * 64, None) is None
    (stored,) = tmp_path.iterdir()
    stored.write_bytes(b"damaged")
    assert known_format("a" * 64, tmp_path) is None
    table = {"c" * 64: {"model": "m", "kv_format": "unheard of"}}
    write_checked(stored, json.dumps(table).encode())
    assert known_format("c" * 64, tmp_path) is None
