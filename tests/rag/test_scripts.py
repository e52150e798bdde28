"""Every script is found by its own search, through the store and back."""

import pytest

from ragflash.rag.records import SearchMode
from tests.rag.test_sparse import SCRIPTS


@pytest.mark.parametrize("mode", [SearchMode.SPARSE, SearchMode.HYBRID])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_question_finds_the_passage_in_its_script(shelf, script, mode):
    question, passage, unrelated = SCRIPTS[script]
    wanted = shelf.add(passage)
    shelf.add(unrelated)
    assert shelf.search(question, mode=mode)[0].chunk.document_id == wanted
