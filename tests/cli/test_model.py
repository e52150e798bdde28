"""The `model` commands on toy files and on the shape that comes along."""

import json
from dataclasses import replace

import pytest

from ragflash.bench.drafter_shape import DRAFTERS
from ragflash.bench.make_model import write_model
from ragflash.cli.hub import HubFile
from ragflash.models.known_formats import known_format
from tests.models.families import FAMILIES
from tests.models.toy_files import write_gguf


@pytest.fixture
def toy(tmp_path):
    family = FAMILIES["qwen35"]
    tensors = family.tensors(family.build())
    return write_gguf(tmp_path / "toy.gguf", "qwen35", family.metadata, tensors)


def test_plan_prints_the_table_and_what_options_cost(run):
    result = run("model", "plan", "qwen35-27b", "--vram", "24", "--ctx", "138696", "--kv", "tq3_0")
    assert result.exit_code == 0
    assert "keys and values, tq3_0" in result.stdout
    assert "1,988,345,856" in result.stdout
    assert "4.57 times less" in result.stdout
    assert "It fits" in result.stdout
    assert "--kv q8_0" in result.stdout


def test_plan_counts_a_drafter(run, tmp_path):
    toy = replace(
        DRAFTERS["dflash-qwen35-27b"], hidden_size=256, ffn_size=256, num_heads=4, num_kv_heads=2
    )
    path = tmp_path / "drafter.gguf"
    write_model(toy.file("toy"), path, seed=1, progress=lambda *_: None)
    result = run("model", "plan", "qwen35-27b", "--drafter", str(path), "--json")
    told = json.loads(result.stdout)
    assert told["parts"]["drafter: keys and values"] == 18 * 256 * 5 * 2 * 2 * 128 * 2
    assert "no drafter" in told["alternatives"]
    refused = run("model", "plan", "qwen35-27b", "--drafter", str(tmp_path / "none.gguf"))
    assert refused.exit_code != 0


def test_plan_says_what_would_fit_when_it_does_not(run):
    result = run("model", "plan", "qwen35-27b", "--ctx", "138696", "--kv", "f16", "--vram", "22.6")
    assert result.exit_code == 1
    assert "It does not fit" in result.stdout
    assert "tokens of context fit" in result.stdout


def test_plan_for_programs(run, toy):
    result = run("model", "plan", str(toy), "--ctx", "1024", "--kv", "q8_0", "--json")
    found = json.loads(result.stdout)
    assert found["fits"]
    assert found["parts"]["keys and values, q8_0"] == 1024 * 2 * 2 * 32 * 34 // 32
    assert found["alternatives"]["--kv f16"] == 1024
    assert found["total_bytes"] == sum(found["parts"].values())


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("nowhere.gguf",), 5, "qwen35-27b"),
        (("qwen35-27b", "--kv", "q3"), 2, "known are f16, q8_0"),
        (("qwen35-27b", "--ctx", "0"), 2, "--ctx 0"),
        (("qwen35-27b", "--vram", "-1"), 2, "--vram"),
        (("qwen35-27b", "--vram", "nan"), 2, "--vram"),
        (("qwen35-27b", "--vram", "inf"), 2, "--vram"),
        (("qwen35-27b", "--slots", "0"), 2, "--slots"),
        (("qwen35-27b", "--ctx", "300000"), 1, "262144 tokens"),
    ],
)
def test_plan_refuses_what_makes_no_sense(run, options, code, words):
    result = run("model", "plan", *options)
    assert result.exit_code == code
    assert words in result.stderr


def test_show_says_what_a_file_is(run, toy):
    found = json.loads(run("model", "show", str(toy), "--json").stdout)
    assert found["architecture"] == "qwen35"
    assert found["weights"] == "F32"
    assert found["kv_bytes_a_token"]["f16"] == 2 * 2 * 32 * 2
    assert found["state_bytes"] > 0
    assert "architecture" in run("model", "show", str(toy)).stdout
    assert run("model", "show", "nowhere.gguf").exit_code == 5


def test_list_has_pulled_files_and_complains_of_broken_ones(run, toy, data_dir):
    folder = data_dir / "models" / "someone" / "Model-GGUF"
    folder.mkdir(parents=True)
    toy.rename(folder / "toy.gguf")
    (folder / "torn.gguf").write_bytes(b"GGUF")
    result = run("model", "list", "--json")
    paths = [model["path"] for model in json.loads(result.stdout)["models"]]
    assert str(folder / "toy.gguf") in paths
    assert "torn.gguf" in result.stderr
    shown = run("model", "list").stdout
    assert "…" not in shown


def test_pull_puts_files_into_the_data_folder(run, data_dir, monkeypatch):
    def fetch(repo, file, target, report, endpoint):
        report(file.name, 4, 4)
        (target / file.name).write_bytes(b"GGUF")
        return target / file.name

    monkeypatch.setattr(
        "ragflash.cli.hub.list_files", lambda repo, endpoint: [HubFile("m-Q8_0.gguf", 4, None)]
    )
    monkeypatch.setattr("ragflash.cli.hub._fetch", fetch)
    found = json.loads(run("model", "pull", "someone/Model-GGUF", "--json").stdout)
    assert found["path"] == str(data_dir / "models" / "someone" / "Model-GGUF" / "m-Q8_0.gguf")
    assert run("model", "pull", "nonsense").exit_code == 2


def test_check_measures_formats_and_remembers_the_best(run, toy, data_dir, tmp_path, monkeypatch):
    row = {"kv_format": "tq4", "context_tokens": 7500, "mean_kl": 0.001, "tail_kl": 0.01}
    row |= {"copied": 0.99, "copied_exact": 1.0, "passes": True}
    asked = []

    def measure(path, prose, **options):
        asked.append(options)
        return {"model": path.name, "sha256": "a" * 64, "best": "tq4", "rows": [row]}

    monkeypatch.setattr("ragflash.bench.kv_quality.check", measure)
    monkeypatch.setattr("sys.argv", ["/bin/ragflash", "model", "check", "toy"])
    out = tmp_path / "quality.json"
    result = run("model", "check", toy, "--kv", "tq4", "--ctx", "7500", "--out", out)
    assert result.exit_code == 0, result.output
    assert "passes" in result.stdout
    assert json.loads(out.read_text())["command"] == "ragflash model check toy"
    assert asked[0]["formats"] == ["tq4"]
    assert asked[0]["sizes"].contexts == (7500,)
    assert known_format("a" * 64, data_dir / "cache") is None, "only one format was measured"
    assert run("model", "check", toy).exit_code == 0
    assert known_format("a" * 64, data_dir / "cache") == "tq4"
    assert run("model", "check", toy, "--kv", "q3").exit_code == 2
