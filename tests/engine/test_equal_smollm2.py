"""A real model with packed keys and values: the same strings whoever drafts."""

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ragflash.engine.build import start_engine
from ragflash.engine.client import EngineClient
from ragflash.engine.constraint import Free, Grammar, GrammarDialect, Literal
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    Finished,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.speculative.costs import StepCosts

MATERIALS = ("steel", "brass", "rubber", "copper", "bronze", "nylon", "zinc")


def lines(count: int) -> str:
    parts = (
        f"Part {at} is of {MATERIALS[at * at % 7]}, weighs {37 * at % 911 + 3} grams.\n"
        for at in range(1, count + 1)
    )
    return "".join(parts)


SCHEMA = {
    "type": "object",
    "properties": {
        "part": {"type": "string", "maxLength": 12},
        "material": {"enum": list(MATERIALS)},
        "grams": {"type": "integer", "minimum": 1, "maximum": 99999},
        "others": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["part", "material", "grams", "others"],
    "additionalProperties": False,
}
TASKS: dict[str, tuple[str, dict[str, object]]] = {
    "copy": (
        "Copy the list of parts word for word, from its first line on.",
        {"constraint": (Literal(lines(2)), Free()), "max_tokens": 90},
    ),
    "json": (
        "Describe the first part of the list as JSON.",
        {
            "constraint": Grammar(GrammarDialect.JSON_SCHEMA, json.dumps(SCHEMA)),
            "max_tokens": 40,
        },
    ),
}


TOKENS_A_LINE = 16.5


def document(num_lines: int) -> TextSegment:
    text = lines(num_lines)
    return TextSegment(SegmentKind.DOCUMENT, text, (Span("parts", 0, 0, len(text)),))


COSTS = StepCosts({0: {rows: 100.0 + 3 * rows for rows in (1, 2, 4, 8, 16, 21)}})


@pytest.fixture
def start(packaged_model_path: Path, monkeypatch) -> Callable[[str], "closing[EngineClient]"]:
    monkeypatch.setattr("ragflash.engine.build.measure_step_costs", lambda *_, **__: COSTS)

    def start(kv_format: str) -> "closing[EngineClient]":
        return closing(
            start_engine(
                packaged_model_path,
                device="cpu",
                dtype="float32",
                kv_format=kv_format,
                threads=2,
                drafts=True,
            )
        )

    return start


def ask(engine: EngineClient, shown: TextSegment, task: str, mode: DraftMode) -> Finished:
    question, options = TASKS[task]
    segments = (shown, TextSegment(SegmentKind.QUESTION, question))
    message = ChatMessage("user", segments)
    request = GenerateRequest(f"{task} {mode}", (message,), draft=mode, **options)
    return asyncio.run(engine.complete(request))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_tokens", [4_096, 7_500])
@pytest.mark.parametrize("kv_format", ["auto", "q8_0", "q4_0", "tq4", "tq3_0"])
def test_copies_and_json_are_the_same_strings(start, kv_format, num_tokens):
    with start(kv_format) as engine:
        shown = document(int(num_tokens / TOKENS_A_LINE))
        for task in TASKS:
            plain = ask(engine, shown, task, DraftMode.OFF)
            assert 0.9 * num_tokens < plain.usage.prompt_tokens < 1.1 * num_tokens
            for mode in (DraftMode.LOOKUP, DraftMode.TREE, DraftMode.AUTO):
                found = ask(engine, shown, task, mode)
                assert (found.text, found.reason) == (plain.text, plain.reason), mode
                assert found.token_ids == plain.token_ids
                if task == "copy":
                    assert found.timings.draft_n_accepted > 0
