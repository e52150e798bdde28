"""Work on documents and answers shows in the metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragflash import metrics
from ragflash.rag.records import AskMode
from ragflash_ingest.document import FailureReason, ParseError
from tests.rag.asking import MODES, PUMP, UNANSWERED, answered
from tests.rag.engines import ScriptedEngine

ENDS = ("done", "failed")


def value(name: str, **labels: str) -> float:
    """Read one number out of the exposition."""
    shown = metrics.exposition(is_ready=True, engine=None, documents=None, jobs=None, sessions=None)
    return sum(
        sample.value
        for family in text_string_to_metric_families(shown.decode())
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    )


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_counted_by_mode_and_success(shelf, mode: AskMode) -> None:
    shelf.add(PUMP)
    for question, success in ((None, "true"), (UNANSWERED, "false")):
        labels = {"mode": mode.value, "answered": success}
        before = value("ragflash_answers_total", **labels)
        timed = value("ragflash_answer_seconds_count", mode=mode.value)
        asked = {} if question is None else {"asked": question}
        assert answered(shelf, ScriptedEngine(), mode=mode, **asked).mode is mode
        assert value("ragflash_answers_total", **labels) == before + 1
        assert value("ragflash_answer_seconds_count", mode=mode.value) == timed + 1


def test_dropped_quotes_and_first_tokens_are_counted(shelf) -> None:
    document_id = shelf.add(PUMP)
    source = shelf.library.get(shelf.scope, document_id).source_id
    before = value("ragflash_dropped_quotes_total")
    tokens = value("ragflash_first_token_seconds_count")
    answered(shelf, ScriptedEngine(quoting=lambda _: [(source, 0, 4)]))
    assert value("ragflash_dropped_quotes_total") == before + 1
    assert value("ragflash_first_token_seconds_count") == tokens + 1


def test_ingest_is_timed_by_how_it_ended(own_shelf) -> None:
    before = {state: value("ragflash_ingest_seconds_count", state=state) for state in ENDS}
    own_shelf.add(PUMP)
    own_shelf.parser.fault = ParseError(FailureReason.NO_TEXT, "it is broken")
    own_shelf.add("Something else.", name="b.txt")
    assert own_shelf.library.health().jobs == {"done": 1, "failed": 1}
    own_shelf.library.close()
    for state in ENDS:
        assert value("ragflash_ingest_seconds_count", state=state) == before[state] + 1
