"""A short document in each script, asked in its language: the packaged models quote it."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from ragflash.cli.parts import SCOPE, library_and_engine
from ragflash.rag.answer import Answerer
from ragflash.rag.records import DEFAULT_COLLECTION, AskRequest
from ragflash.settings import load_settings

# Text, question, and the words that the first quote must hold.
ASKS = {
    "ar": (
        "تُحفظ الإيصالات في قسم المحاسبة لمدة سبع سنوات. تقع قاعة الاجتماعات في الطابق الثالث.",
        "أين تقع قاعة الاجتماعات؟",
        "الطابق الثالث",
    ),
    "de": (
        "Belege werden sieben Jahre lang in der Buchhaltung verwahrt. "
        "Das Besprechungszimmer liegt im dritten Stock.",
        "Wo liegt das Besprechungszimmer?",
        "im dritten Stock",
    ),
    "fa": (
        "رسیدها هفت سال در بخش حسابداری نگهداری می‌شوند. اتاق جلسه در طبقه سوم ساختمان است.",
        "اتاق جلسه كجاست؟",
        "طبقه سوم",
    ),
    "ja": (
        "領収書は経理部で七年間保管します。会議室は本館の三階にあります。",
        "会議室はどこにありますか。",
        "本館の三階",
    ),
    "zh": ("收据由会计部门保存七年。会议室在主楼的三层。", "会议室在哪里？", "主楼的三层"),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Iterator[tuple]:
    settings = load_settings(data_dir=tmp_path_factory.mktemp("languages"))
    with library_and_engine(settings) as (library, engine), closing(library):
        yield library, engine


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("language", ASKS)
def test_a_question_is_answered_with_what_the_document_says(parts, language):
    library, engine = parts
    text, question, held = ASKS[language]
    added = library.add(SCOPE, DEFAULT_COLLECTION, f"{language}.txt", text.encode())
    library.wait(SCOPE, added.job.id)
    answerer = Answerer(library, engine)
    answer = asyncio.run(answerer.answer(SCOPE, AskRequest(question, (added.document.id,))))
    assert answer.answered
    for citation in answer.citations:
        assert text[citation.start : citation.end] == citation.quote
    assert any(held in citation.quote for citation in answer.citations)
