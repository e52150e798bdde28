"""Tables and projections of `bench drafting`, from series that are made up."""

import json

import pytest

from ragflash.bench import drafting
from ragflash.bench.draft_projection import PUBLISHED, project
from ragflash.bench.record import Measurement, Series, build


def steps_at(depth, plain=5.0):
    times = {1: plain, 2: 6.0, 5: 7.0, 16: 9.0, 21: 12.0}
    series = {f"verify{rows}_ms_depth{depth}": Series("ms", [ms]) for rows, ms in times.items()}
    series[f"plain_ms_depth{depth}"] = series.pop(f"verify1_ms_depth{depth}")
    series |= {
        f"verify16_with_draft_ms_depth{depth}": Series("ms", [9.5]),
        f"draft_extra_ms_depth{depth}": Series("ms", [0.5]),
        f"told_plain_ms_depth{depth}": Series("ms", [5.5]),
    }
    for name, rows, ms in (("mtp4", 5, 10.0), ("dflash", 16, 12.5), ("tree", 21, 16.0)):
        series |= {
            f"{name}_rows_depth{depth}": Series("rows", [rows]),
            f"{name}_step_ms_depth{depth}": Series("ms", [ms]),
            f"{name}_adds_ms_depth{depth}": Series("ms", [3.0]),
            f"{name}_propose_ms_depth{depth}": Series("ms", [2.0]),
        }
    return series


def answers_of(task, context, tokens, rows, name="lookup"):
    off = f"{task}_{context}_off_tok_s"
    return {
        off: Series("tokens/s", [10.0] * 7),
        f"{task}_{context}_{name}_tok_s": Series("tokens/s", [25.0] * 7, against=off),
        f"{task}_{context}_{name}_tokens_per_step": Series("tokens", [tokens] * 7),
        f"{task}_{context}_{name}_rows_per_step": Series("rows", [rows] * 7),
    }


SERIES = {
    **answers_of("copy", 1024, 6.0, 10.5),
    **answers_of("copy", 7500, 5.0, 16.0),
    **answers_of("free", 1024, 1.0, 1.0),
    **steps_at(0),
    **steps_at(9000),
}
ROWS = [
    {"task": task, "context_tokens": context, "copied_share": 0.97}
    for task, context in (("copy", 1024), ("copy", 7500), ("free", 1024))
]


def found(source, task, depth):
    rows = project(SERIES, ROWS)
    assert {row["depth"] for row in rows} == {0, 9000}
    (row,) = [
        row for row in rows if (row["source"], row["task"], row["depth"]) == (source, task, depth)
    ]
    return row


def test_lookups_are_projected_from_the_nearest_length_and_the_rows_of_a_step():
    near = found("lookup", "copy", 0)
    assert near["step_ms"] == 7.0 + 2.0 * (10.5 - 5) / 11 + 0.5
    assert near["tok_s"] == pytest.approx(1000 * 6.0 / near["step_ms"], abs=0.051)
    assert near["times_plain"] == pytest.approx(6.0 * 5.0 / near["step_ms"], abs=0.005)
    deep = found("lookup", "copy", 9000)
    assert (deep["tokens_per_step"], deep["step_ms"]) == (5.0, 9.5)
    alone = found("lookup", "free", 0)
    assert (alone["step_ms"], alone["times_plain"]) == (5.5, 0.91)


@pytest.mark.parametrize(
    ("steps", "task", "tokens", "step_ms"),
    [("mtp4", "copy", 3.81, 10.0), ("dflash", "rag", 8.43, 12.5), ("tree", "GSM8K", 6.14, 16.0)],
)
def test_what_others_published_is_divided_by_our_time_of_a_step(steps, task, tokens, step_ms):
    row = found(steps, task, 9000)
    assert row["projected"] is True
    assert row["tok_s"] == pytest.approx(1000 * tokens / step_ms, abs=0.051)
    (where,) = [one.where for one in PUBLISHED if one.steps == steps]
    assert row["tokens_from"] == where
    assert "github.com/" in where


def test_the_tables_have_every_row_of_both_devices():
    peer = {
        name.replace("copy", "peer_copy"): Series(
            one.unit, one.values, one.against and one.against.replace("copy", "peer_copy")
        )
        for width in ("lookup2", "lookup10")
        for name, one in answers_of("copy", 1024, 2.5, 3.0, name=width).items()
    }
    parameters = {
        "device": "a card",
        "rows": ROWS,
        "peer_rows": [{"task": "copy", "context_tokens": 1024, "copied_share": 0.5}],
        "projected": project(SERIES, ROWS),
    }
    measurement = Measurement(SERIES | peer, threads=1, parameters=parameters, is_flat=True)
    result = json.loads(json.dumps(build("drafting", {"command": "bench"}, measurement)))
    tables = drafting.markdown(result)
    answers = tables.split("\n\n")[0]
    assert answers.split("\n")[2] == (
        "| a card | copy | 1,024 | 97% | `lookup` | 6.00 | 10.0 | 25.0 | 2.50 (2.50 to 2.50) |"
    )
    assert "| a card | copy | 1,024 | 50% | llama.cpp's lookup2 | 2.50 | 10.0 | 25.0 |" in answers
    assert len(answers.split("\n")) == 2 + 3 + 2
    assert "| `tree` | 9,000 | 21 | 16.00 | 3.00 | 2.00 |" in tables
    assert "| lookups besides | 0 | 16 | 9.50 | 0.50 |  |" in tables
    assert "Projected, not measured:\n\n| drafts | task |" in tables
    assert "| `dflash` | rag | 9,000 | 8.43 | 12.5 | 674 | 3.37 |" in tables
    assert f"- `mtp4`: {PUBLISHED[0].where}." in tables
    assert "Not measured" not in tables
    lacking = drafting.markdown(result | {"missing": ["free_7500"]})
    assert lacking == f"{tables}\n\nNot measured (a card): free_7500."
    result["parameters"]["beside"] = {**result}
    both = drafting.markdown(result)
    assert both.count("| `tree` | 9,000 | 21 |") == 2
    assert both.startswith(answers + "\n" + "\n".join(answers.split("\n")[2:]))
