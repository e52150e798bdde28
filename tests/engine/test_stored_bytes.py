"""What stored prompts take of memory, under the names that their files have."""

import pytest

from ragflash.errors import EngineDead
from ragflash.kvcache.allocator import PageForm
from ragflash.sessions import FolderArchive
from tests.engine.harness import toy_engine
from tests.engine.test_two_forms import ReaderModel
from tests.engine.toys import (
    ToyModel,
    ToyRecurrentModel,
    ask,
    byte_tokenizer,
    document,
    random_logits,
)
from tests.sessions.samples import IDENTITY, open_folder

TOKENIZER = byte_tokenizer()
FIRST, SECOND = document("a" * 300, "a"), document("b" * 300, "b")


def model() -> ToyModel:
    return ToyModel(random_logits(TOKENIZER.vocab_size), vocab_size=TOKENIZER.vocab_size)


def test_a_page_that_segments_share_counts_for_the_first_under_the_names_of_files(tmp_path):
    folder = open_folder(tmp_path)
    archive = FolderArchive(folder)
    with toy_engine(model(), TOKENIZER, archive=archive, identity=IDENTITY) as engine:
        assert engine.client.stored_bytes() == {}
        engine.complete(ask("?", FIRST, SECOND, max_tokens=1))
        archive.flush()
        page_bytes = engine.pages.page(PageForm.EXACT, 0).nbytes
        ids = {info.end: info.id for info in folder.list()}
        # 300 tokens fill a page and a part of the next, which each of both has for itself.
        assert engine.client.stored_bytes() == {ids[300]: 2 * page_bytes, ids[600]: 2 * page_bytes}
        engine.store.drop_all()
        assert engine.client.stored_bytes() == {}
    archive.close()
    folder.close()


def test_packed_pages_count_too():
    with toy_engine(ReaderModel(), TOKENIZER, kv_format="q8_0") as engine:
        engine.complete(ask("?", document("a" * 2000, "a"), max_tokens=1))
        (segment,) = engine.store.stored()
        sizes = [engine.pages.page(form, 0).nbytes for form in PageForm]
        numbers = [len(segment.pages), len(segment.packed_pages)]
        assert all(numbers)
        (found,) = engine.client.stored_bytes().values()
        assert found == sum(size * number for size, number in zip(sizes, numbers, strict=True))


def test_recurrent_state_counts_where_there_are_no_pages():
    with toy_engine(ToyRecurrentModel(vocab_size=TOKENIZER.vocab_size), TOKENIZER) as engine:
        engine.complete(ask("?", FIRST, max_tokens=1))
        assert [*engine.client.stored_bytes().values()] == [8]  # one int64


def test_an_engine_that_has_ended_says_so():
    with toy_engine(model(), TOKENIZER) as engine:
        pass
    with pytest.raises(EngineDead):
        engine.client.stored_bytes()
