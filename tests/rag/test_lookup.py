"""Indexes that drafts are copied from: made with the document, kept, mended, and gone with it."""

import errno
import mmap
from dataclasses import dataclass, replace
from hashlib import sha256

import pytest

from ragflash.engine.drafting import Drafting
from ragflash.engine.prompt import compile_prompt
from ragflash.rag import lookup
from ragflash.rag.disk import Disk
from ragflash.rag.records import AskMode, DocumentState, Scope
from ragflash.speculative.lookup import SourceIndex
from tests.engine.toys import TurnTemplate, byte_tokenizer
from tests.rag.asking import PUMP, WARRANTY, answered
from tests.rag.engines import ScriptedEngine, rendered

MINE = Scope(frozenset({"mine"}))
ELSEWHERE = "Lighthouse keepers polish the lens on every second Tuesday of the month."
PAGES = f"{PUMP}\f{'Nothing of any interest stands on this page. ' * 60}\f{ELSEWHERE}"


@dataclass(frozen=True)
class Cutter:
    """One token a character, counted from `first`."""

    first: int = 0

    @property
    def fingerprint(self):
        return f"{self.first:016x}"

    def encode(self, text):
        return [self.first + ord(character) for character in text]


@pytest.fixture
def text(request):
    """A text of this test's own, so that no other's index is its index."""
    return f"{request.node.name}\n{PAGES}"


@pytest.fixture
def take_in(shelf, text, monkeypatch):
    """Adds the text to the library as one that has a model's tokenizer."""

    def add(collection=None):
        monkeypatch.setattr(shelf.library._ingestor, "_cutter", Cutter)
        place = shelf if collection is None else replace(shelf, collection=collection)
        return shelf.library.get(place.scope, place.add(text))

    return add


@pytest.fixture
def stored(shelf, text):
    """Lists the files of the text's indexes."""
    place = shelf.library._files._parsed
    digest = sha256(text.encode()).hexdigest()
    return lambda: [*place.glob(f"*/{digest}/*/*.lookup")]


def index_of(shelf, record, cutter=None):
    document = shelf.library.document(shelf.scope, record.id)
    return shelf.library.lookup_index(record, document, cutter or Cutter())


def incoming(shelf):
    return [*shelf.library._files._incoming.iterdir()]


def no_building(monkeypatch):
    monkeypatch.setattr(SourceIndex, "build", lambda tokens: pytest.fail("it was built again"))


def test_an_index_is_made_with_the_document_and_mapped_after_a_restart(
    open_library, tmp_path, monkeypatch
):
    library = open_library(cutter=Cutter)
    added = library.add(MINE, "mine", "a.txt", PAGES.encode())
    library.wait(MINE, added.job.id, 30)
    (path,) = tmp_path.rglob("*.lookup")
    assert path.stat().st_size <= 18 * len(PAGES) + 1024
    library.close()
    no_building(monkeypatch)
    again = open_library()
    record = again.get(MINE, added.document.id)
    index = again.lookup_index(record, again.document(MINE, record.id), Cutter())
    assert isinstance(index.block, mmap.mmap)
    assert index.tokens(0, len(index)) == tuple(map(ord, PAGES.replace("\f", "\n")))


def test_a_document_that_was_taken_in_without_a_model_gets_its_index_when_it_is_asked(
    shelf, text, stored, monkeypatch
):
    record = shelf.library.get(shelf.scope, shelf.add(text))
    assert stored() == []
    made = index_of(shelf, record)
    assert len(stored()) == 1
    no_building(monkeypatch)
    assert index_of(shelf, record).block[:] == made.block


@pytest.mark.parametrize("mode", [AskMode.RETRIEVE, AskMode.FULL])
def test_drafts_of_an_answer_are_copied_from_pages_that_the_prompt_has_not(shelf, take_in, mode):
    tokenizer = byte_tokenizer()
    take_in()
    engine = ScriptedEngine(lookup_tokenizer=tokenizer, context_tokens=1 << 20)
    assert answered(shelf, engine, mode=mode).answered
    (request,) = engine.generated
    assert WARRANTY in rendered(request)
    assert (ELSEWHERE in rendered(request)) == (mode is AskMode.FULL)
    drafting = Drafting()
    prompt = compile_prompt(request.messages, TurnTemplate(), tokenizer)
    drafter = drafting.prepare(prompt, request)
    history = [*prompt.token_ids, *tokenizer.encode(ELSEWHERE[:12])]
    draft = drafter.propose(history, 16)
    assert bytes(draft.token_ids).decode() == ELSEWHERE[12 : 12 + len(draft.token_ids)]
    assert len(draft.token_ids) >= 15
    assert drafting._indexes.num_bytes == 0, "the document's own index was enough"


def test_no_index_is_left_of_a_deleted_document(shelf, text, take_in, stored):
    record = take_in()
    document = shelf.library.document(shelf.scope, record.id)
    asked = index_of(shelf, record)
    shelf.library.delete(shelf.scope, record.id)
    assert stored() == []
    assert asked.tokens(0, 4) == tuple(map(ord, text[:4])), "who has it open can end the answer"
    late = shelf.library.lookup_index(record, document, Cutter())
    assert late.block == asked.block[:]
    assert stored() == incoming(shelf) == []


def test_an_index_stays_while_another_document_has_the_same_bytes(shelf, take_in, stored):
    first, second = take_in(), take_in("other")
    shelf.library.delete(shelf.scope, first.id)
    assert len(stored()) == 1
    shelf.library.delete(Scope(frozenset({"other"})), second.id)
    assert stored() == []


def test_a_damaged_index_is_made_anew_and_the_log_says_why(shelf, take_in, stored, caplog):
    record = take_in()
    (path,) = stored()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for damaged in (flipped, whole[:-64], b""):
        path.write_bytes(damaged)
        caplog.clear()
        assert index_of(shelf, record).block == whole
        assert path.read_bytes() == whole
        (line,) = [one for one in caplog.records if one.name == lookup.__name__]
        assert line.message == "a document's index is made anew"
        assert line.reason


def test_another_tokenizers_index_takes_the_place_of_the_one_before(shelf, text, take_in, stored):
    record = take_in()
    (before,) = stored()
    index = index_of(shelf, record, Cutter(first=1000))
    (after,) = stored()
    assert after != before
    assert index.tokens(0, 4) == tuple(1000 + ord(character) for character in text[:4])
    assert index_of(shelf, record).tokens(0, 4) == tuple(map(ord, text[:4]))


@pytest.mark.parametrize("operation", ["write", "move"])
def test_a_full_disk_costs_the_file_alone(
    shelf, text, take_in, stored, operation, monkeypatch, caplog
):
    whole = getattr(Disk, operation)

    def refuse(self, path, other):
        if operation == "move" and other.suffix != ".lookup":
            return whole(self, path, other)
        if operation == "write" and not (other := tuple(other))[0].startswith(b"rflookup"):
            return whole(self, path, other)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, operation, refuse)
    record = take_in()
    assert record.state is DocumentState.READY
    assert record.tokens == len(text)
    assert len(index_of(shelf, record)) == len(text)
    assert stored() == incoming(shelf) == []
    assert {one.message for one in caplog.records if one.name == lookup.__name__} == {
        "a document's index is not kept"
    }


@pytest.mark.parametrize("limit", [{"MOST_CHARACTERS": 99}, {"TOKENS": range(16, 99)}])
def test_texts_that_are_too_long_have_none(shelf, text, take_in, stored, limit, monkeypatch):
    monkeypatch.setattr(lookup, *limit.popitem())
    record = take_in()
    assert record.tokens == len(text)
    assert index_of(shelf, record) is None
    assert stored() == []
