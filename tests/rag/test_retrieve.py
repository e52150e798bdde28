from dataclasses import replace

import numpy as np
import pytest

from ragflash.errors import NotFound, QuestionBlank
from ragflash.rag.index import VectorHit
from ragflash.rag.records import SearchMode
from ragflash.rag.retrieve import fuse
from ragflash_ingest.document import Section


@pytest.fixture
def error_codes(shelf, monkeypatch):
    """18 passages about errors; only one has E4304, and the dense leg ranks it 13th."""
    ids = {}
    for number in range(18):
        code = "E4304" if number == 12 else f"E{5000 + number}"
        ids[shelf.add(f"Error {code} is shown when the device fails.")] = number

    def rank(vector, scope, limit):
        return [VectorHit(id_, 0, 0.9 - 0.01 * number) for id_, number in ids.items()]

    monkeypatch.setattr(shelf.library._retriever._index, "query_dense", rank)
    return shelf


@pytest.mark.parametrize("query", ["E4304", "E 4304", "e4304", "what does E-4304 mean?"])
def test_an_exact_code_wins_over_what_only_sounds_alike(error_codes, query):
    hits = error_codes.search(query)
    assert "E4304" in hits[0].chunk.text
    assert hits[0].exact
    assert hits[0].score == pytest.approx(1 / 61 + 1 / 73)
    assert not any(hit.exact for hit in hits[1:])


def test_an_absent_code_claims_no_exact_hit(error_codes):
    hits = error_codes.search("E4305")
    assert hits
    assert not any(hit.exact for hit in hits)
    assert all(hit.sparse_score is None for hit in hits)


def test_an_exact_hit_that_fusion_buries_is_lifted_to_third(shelf):
    for number in range(12):
        shelf.add(f"The pump makes noise noise noise, pump pump number {number}", f"{number}.txt")
    shelf.add(
        "Table of parts and codes, among them X77, and many other words about shipping", "x.txt"
    )
    hits = shelf.search("pump noise X77", mode=SearchMode.DENSE)
    assert [hit.exact for hit in hits].index(True) <= 2


def test_each_leg_says_what_it_found(shelf):
    shelf.add("The warranty lasts two years.")
    (both,) = shelf.search("warranty")
    assert both.dense_score is not None
    assert both.sparse_score is not None
    assert both.score == pytest.approx(2 / 61)
    (dense,) = shelf.search("warranty", mode=SearchMode.DENSE)
    assert (dense.sparse_score, dense.score) == (None, pytest.approx(1 / 61))
    (sparse,) = shelf.search("warranty", mode=SearchMode.SPARSE)
    assert (sparse.dense_score, sparse.score) == (None, pytest.approx(1 / 61))


def test_a_blind_leg_has_no_weight(shelf, monkeypatch):
    shelf.add("The warranty lasts two years.")
    nothing = np.zeros(shelf.embedder.dim, np.float32)
    monkeypatch.setattr(shelf.embedder, "encode_query", lambda text: nothing)
    (hit,) = shelf.search("warranty")
    assert (hit.score, hit.dense_score) == (pytest.approx(1 / 61), None)


def test_a_leg_that_cannot_read_the_query_has_no_say(shelf, monkeypatch):
    for number in range(3):
        shelf.add(f"Nothing of that kind is here {number}.", f"{number}.txt")
    right = shelf.add("The warranty lasts two years.")
    index = shelf.library._retriever._index
    query_dense = index.query_dense

    def worst_first(vector, scope, limit):
        return sorted(query_dense(vector, scope, limit), key=lambda hit: hit.document_id == right)

    monkeypatch.setattr(index, "query_dense", worst_first)
    for trust, found in ((0.0, 1), (0.5, 4)):
        monkeypatch.setattr(shelf.embedder, "trust", lambda text, trust=trust: trust)
        hits = shelf.search("warranty here nothing that kind of" if trust else "warranty")
        assert len(hits) == found
    monkeypatch.setattr(shelf.embedder, "trust", lambda text: 0.0)
    assert shelf.search("warranty")[0].chunk.document_id == right


def test_the_only_leg_that_finds_anything_is_heard_whatever_its_trust(shelf, monkeypatch):
    shelf.add("The warranty lasts two years.")
    monkeypatch.setattr(shelf.embedder, "trust", lambda text: 0.0)
    (hit,) = shelf.search("warranty", mode=SearchMode.DENSE)
    assert hit.score == pytest.approx(1 / 61)


def test_what_matches_nothing_is_not_returned(shelf):
    shelf.add("The warranty lasts two years.")
    assert shelf.search("zebra", mode=SearchMode.SPARSE) == []


def test_rarer_words_weigh_more(shelf):
    for number in range(8):
        shelf.add(f"The printer number{number} is in the hall.", f"{number}.txt")
    rare = shelf.add("The toner is in the cellar.")
    (first, *_) = shelf.search("printer toner", mode=SearchMode.SPARSE)
    assert first.chunk.document_id == rare
    weights = shelf.library.term_weights("printer toner unheardof")
    assert weights.keys() == shelf.library.term_weights("unheardof toner printer").keys()
    printer, toner, unheard = (
        max(shelf.library.term_weights(word).values()) for word in ("printer", "toner", "unheardof")
    )
    assert printer < toner < unheard


def test_headings_are_searched_with_their_text(shelf, monkeypatch):
    parse = shelf.parser.parse
    sections = (Section("Returns policy", 1, 0),)
    monkeypatch.setattr(
        shelf.parser, "parse", lambda *args, **kw: replace(parse(*args, **kw), sections=sections)
    )
    shelf.add("Goods go back within a month.")
    (hit,) = shelf.search("returns", mode=SearchMode.SPARSE)
    assert hit.chunk.section == "Returns policy"
    assert hit.chunk.text == "Goods go back within a month."


def test_only_the_documents_named_are_searched(shelf):
    shelf.add("The warranty lasts two years.", "a.txt")
    other = shelf.add("The warranty lasts three years.", "b.txt")
    hits = shelf.search("warranty", document_ids=[other])
    assert {hit.chunk.document_id for hit in hits} == {other}
    assert hits[0].document_name == "b.txt"
    assert shelf.search("warranty", document_ids=[]) == []
    with pytest.raises(NotFound):
        shelf.search("warranty", document_ids=[other, "doc_none"])


def test_the_limit_is_kept(shelf):
    for number in range(4):
        shelf.add(f"warranty {number}", f"{number}.txt")
    assert len(shelf.search("warranty", limit=3)) == 3


@pytest.mark.parametrize("query", ["", "  \n", "?!", "…"])
def test_a_blank_query_is_refused(shelf, query):
    with pytest.raises(QuestionBlank):
        shelf.search(query)


def test_fusion_adds_reciprocal_ranks():
    first = [VectorHit("a", 0, 9.0), VectorHit("b", 0, 8.0)]
    second = [VectorHit("b", 0, 0.5)]
    assert fuse([(first, 1.0), (second, 1.0), ([], 1.0)]) == {
        ("a", 0): 1 / 61,
        ("b", 0): 1 / 62 + 1 / 61,
    }
