"""After a restart, and after a kill, whole models answer from files bit for bit as they compute."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.restarted import LENGTHS, ask, engine_on, told
from tests.models.families import FAMILIES
from tests.models.toy_files import write_toy
from tests.sessions.samples import files_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("toys"), dict[str, Path]()

    def toy(name: str) -> Path:
        if name not in made:
            made[name] = write_toy(folder / f"{name}.gguf", FAMILIES[name])
        return made[name]

    return toy


def in_new_process(sessions: Path, model: Path, *numbers: int, kill_at: int = 0):
    command = [sys.executable, "-m", "tests.engine.restarted", sessions, model, kill_at, *numbers]
    return subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def answers_of(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


# Attention alone, attention with a window, recurrent layers between attention.
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen35"])
def test_a_restarted_process_answers_from_files_bit_for_bit(toys, name, tmp_path):
    model, numbers = toys(name), range(len(LENGTHS))
    with engine_on(model, None) as (engine, _):
        cold = [told(engine, number, cache=False) for number in numbers]
    with engine_on(model, tmp_path) as (engine, _):
        for number in numbers:
            ask(engine, number, "What?", max_tokens=0)
    warm = answers_of(in_new_process(tmp_path, model, *numbers))
    for number, computed, found in zip(numbers, cold, warm, strict=True):
        assert found["tokens"] == computed["tokens"]
        assert found["logprobs"] == computed["logprobs"]
        assert (found["tier"], computed["tier"]) == ("file", "none")
        assert found["cached"] >= LENGTHS[number]
        assert found["rows"] == found["computed"] + max(0, len(found["tokens"]) - 1)
        assert computed["rows"] - found["rows"] == found["cached"]


def test_a_kill_in_the_middle_of_a_save_costs_that_segment_at_most(toys, tmp_path):
    model, number = toys("qwen35"), len(LENGTHS) - 1
    killed = in_new_process(tmp_path, model, number, kill_at=7)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with engine_on(model, None) as (engine, _):
        cold = told(engine, number)
    with engine_on(model, tmp_path) as (engine, archive):
        assert list(tmp_path.glob("*/*.part")) == []
        first = told(engine, number)
        assert (first["tokens"], first["logprobs"]) == (cold["tokens"], cold["logprobs"])
        archive.flush()
        assert len(files_of(tmp_path)) == 2
    with engine_on(model, tmp_path) as (engine, _):
        again = told(engine, number)
        assert (again["tokens"], again["logprobs"]) == (cold["tokens"], cold["logprobs"])
        assert (again["tier"], again["cached"] >= LENGTHS[number]) == ("file", True)
