"""What `ask` says of the work behind an answer."""

from dataclasses import replace

import pytest

from ragflash.cli.ask import describe
from ragflash.rag.records import AskRequest
from tests.api.fakes import DRAFTS, answer

ARGUMENTS = ("ask", "How long?", "--engine", "none")


def described(**changes: object) -> str:
    given = answer()
    engine = replace(given.timings.engine, **changes)
    return describe(replace(given, timings=replace(given.timings, engine=engine)))


def test_where_drafts_came_from_is_said():
    drafts = (replace(DRAFTS[0], drafted=70, accepted=60), replace(DRAFTS[1], accepted=2))
    said = described(draft_n=80, draft_n_accepted=62, drafts=drafts)
    assert " · 62 of 80 drafts taken (lookup 60, lookup_output 2) · " in said


def test_why_there_were_none_is_said():
    nothing = {"draft_n": 0, "draft_n_accepted": 0, "drafts": ()}
    said = described(**nothing, idle_steps=(("nothing_found", 12), ("no_gain", 3)))
    assert " · no drafts (nothing_found 12, no_gain 3) · " in said
    assert "drafts" not in described(**nothing, idle_steps=())


def test_who_drafts_reaches_the_answerer(run, monkeypatch):
    asked: list[AskRequest] = []

    async def follow(_, request, __):
        asked.append(request)
        return answer()

    monkeypatch.setattr("ragflash.cli.ask.follow", follow)
    run(*ARGUMENTS)
    run(*ARGUMENTS, "--draft", "lookup", "--draft-tokens", "5")
    assert [(request.draft, request.draft_tokens) for request in asked] == [
        ("auto", None),
        ("lookup", 5),
    ]


@pytest.mark.parametrize("wrong", [("--draft", "guess"), ("--draft-tokens", "0")])
def test_drafts_that_nobody_knows_are_wrong_usage(run, wrong):
    assert run(*ARGUMENTS, *wrong).exit_code == 2
