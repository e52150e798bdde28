"""Asks of one library, and what there is to ask about."""

import asyncio

from ragflash.rag.answer import Answerer
from ragflash.rag.records import (
    Answer,
    AskMode,
    AskRequest,
)
from tests.rag.engines import ScriptedEngine

WARRANTY = "The warranty of the pump lasts 24 months from the day of delivery."
PUMP = (
    "This handbook is about the pump. Bread is sold every morning in the village. "
    f"{WARRANTY} Nobody has ever seen the sea from here."
)
QUESTION = "How many months does the warranty of the pump last?"
UNANSWERED = "How many submarines does the admiral own?"
MODES = (AskMode.FULL, AskMode.RETRIEVE)
ENGINES = {"engine": ScriptedEngine, "no engine": lambda: None}


def run(shelf, engine=None, asked=QUESTION, *, scope=None, config=None, **options):
    """All events of one ask; a fixed fence key, so that prompts can be compared."""
    answerer = Answerer(shelf.library, engine, config, fence_key=b"key")

    async def collect():
        request = AskRequest(asked, **options)
        return [event async for event in answerer.ask(scope or shelf.scope, request)]

    return asyncio.run(collect())


def answered(shelf, engine=None, asked=QUESTION, **options) -> Answer:
    last = run(shelf, engine, asked, **options)[-1]
    assert isinstance(last, Answer)
    return last


def citations_are_in_the_text(shelf, answer: Answer, scope=None) -> bool:
    texts = {
        citation.document_id: shelf.library.document(
            scope or shelf.scope, citation.document_id
        ).text
        for citation in answer.citations
    }
    return all(
        citation.quote == texts[citation.document_id][citation.start : citation.end]
        for citation in answer.citations
    )


def at(text: str, part: str) -> tuple[int, int]:
    return text.index(part), text.index(part) + len(part)
