"""Models are fetched whole or not at all, and every refusal says what to do."""

import random
from pathlib import Path

import pytest

from ragflash.cli.hub import HubFile, choose, parse_reference, pull
from ragflash.errors import AccessDenied, NotFound, SettingInvalid, UpstreamError
from tests.cli.hub_server import Hub, running_hub

REPO = "someone/Model-GGUF"
DATA = random.Random(0).randbytes(300_000)


@pytest.fixture
def hub():
    with running_hub() as server:
        server.repos[REPO] = {
            "README.md": b"# A model",
            "Model-Q4_K_M.gguf": DATA,
            "Model-Q8_0.gguf": DATA[::-1],
            "mmproj-F16.gguf": b"vision",
            "big/Model-BF16-00001-of-00002.gguf": DATA[:1000],
            "big/Model-BF16-00002-of-00002.gguf": DATA[1000:2000],
        }
        yield server


@pytest.fixture(autouse=True)
def online(monkeypatch) -> None:
    """The suite is offline; these tests ask a hub on loopback, as nobody."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def fetch(hub: Hub, reference: str, folder: Path) -> tuple[Path, list[tuple[str, int, int]]]:
    told: list[tuple[str, int, int]] = []
    path = pull(
        reference, folder, report=lambda *progress: told.append(progress), endpoint=hub.address
    )
    return path, told


def test_fetches_the_usual_quant_and_tells_how_far_it_is(hub, tmp_path):
    path, told = fetch(hub, REPO, tmp_path)
    assert path == tmp_path / REPO / "Model-Q4_K_M.gguf"
    assert path.read_bytes() == DATA
    assert ("Model-Q4_K_M.gguf", len(DATA), len(DATA)) in told
    assert told[-1] == ("checking Model-Q4_K_M.gguf", len(DATA), len(DATA))


def test_fetches_what_is_named_in_any_case(hub, tmp_path):
    path, _ = fetch(hub, f"{REPO}:q8_0", tmp_path)
    assert path.read_bytes() == DATA[::-1]


def test_fetches_all_parts(hub, tmp_path):
    path, _ = fetch(hub, f"{REPO}:bf16", tmp_path)
    assert path.name == "Model-BF16-00001-of-00002.gguf"
    assert path.with_name("Model-BF16-00002-of-00002.gguf").read_bytes() == DATA[1000:2000]


def test_does_not_fetch_twice(hub, tmp_path):
    fetch(hub, REPO, tmp_path)
    hub.ranges.clear()
    fetch(hub, REPO, tmp_path)
    assert hub.ranges == []


def test_goes_on_where_it_stopped(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.cut_at = 100_000
    path, _ = fetch(hub, REPO, tmp_path)
    assert path.read_bytes() == DATA
    assert hub.ranges == [None, "bytes=100000-"]


def test_removes_what_arrived_damaged(hub, tmp_path):
    hub.damaged = True
    with pytest.raises(UpstreamError, match="arrived damaged"):
        fetch(hub, REPO, tmp_path)
    assert not (tmp_path / REPO / "Model-Q4_K_M.gguf").exists()
    hub.damaged = False
    path, _ = fetch(hub, REPO, tmp_path)
    assert path.read_bytes() == DATA


@pytest.mark.parametrize(
    ("reference", "error", "words"),
    [
        (f"{REPO}:Q2_K", NotFound, r"Model-Q8_0\.gguf, big/Model-BF16\.gguf"),
        ("someone/nothing", NotFound, "knows no someone/nothing"),
        ("someone/secret", AccessDenied, "accept its terms"),
        ("no-owner", SettingInvalid, "OWNER/REPO"),
        ("a/b/c", SettingInvalid, "OWNER/REPO"),
    ],
)
def test_says_why_not(hub, tmp_path, reference, error, words):
    hub.gated.add("someone/secret")
    with pytest.raises(error, match=words):
        fetch(hub, reference, tmp_path)


def test_writes_nothing_outside_of_the_folder(hub, tmp_path):
    hub.repos[REPO] = {"../../../Model-Q4_K_M.gguf": DATA}
    with pytest.raises(UpstreamError, match="cannot contain"):
        fetch(hub, REPO, tmp_path / "models")
    assert not list(tmp_path.rglob("Model-Q4*"))


def test_says_that_nobody_answers(tmp_path):
    with running_hub() as gone:
        pass
    with pytest.raises(UpstreamError, match=r"cannot be reached .* set RAGFLASH_MODEL"):
        fetch(gone, REPO, tmp_path)


def test_says_that_it_may_not_ask(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UpstreamError, match="HF_HUB_OFFLINE is set"):
        fetch(hub, REPO, tmp_path)


def files(*names: str) -> list[HubFile]:
    return [HubFile(name, 1, None) for name in names]


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [
        (["m.Q4_1.gguf"], None, "m.Q4_1.gguf"),
        (["only-IQ3_XS.gguf"], None, "only-IQ3_XS.gguf"),
        (["m-Q4_K_S.gguf", "m-Q4_K_M.gguf"], None, "m-Q4_K_M.gguf"),
        (["m-Q4_K.gguf", "m-Q4_K_M.gguf"], "Q4_K", "m-Q4_K.gguf"),
        (["m-UD-Q4_K_XL.gguf", "m-IQ4_XS.gguf"], "iq4_xs", "m-IQ4_XS.gguf"),
        (["mtp-m-Q4_K_M.gguf", "m-Q4_K_M.gguf"], None, "m-Q4_K_M.gguf"),
    ],
)
def test_chooses_by_the_name(names, quant, expected):
    assert [file.name for file in choose(files(*names), quant, REPO)] == [expected]


@pytest.mark.parametrize(
    ("names", "quant", "words"),
    [
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], None, "does not name one"),
        (["a-Q3_K.gguf", "a-Q6_K.gguf"], None, "a-Q3_K.gguf, a-Q6_K.gguf"),
        (["model.safetensors"], None, "no GGUF"),
        (["m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"], None, "2 of 00003 parts"),
    ],
)
def test_guesses_nothing(names, quant, words):
    with pytest.raises(NotFound, match=words):
        choose(files(*names), quant, REPO)


def test_reads_references():
    assert parse_reference("a/b") == ("a/b", None)
    assert parse_reference("a/b:Q4_K_M") == ("a/b", "Q4_K_M")
