import importlib.metadata
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from qdrant_client.common.version_check import is_compatible

ROOT = Path(__file__).parents[2]


def test_compose_file_follows_the_specification():
    check = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.compose-spec", "compose.yaml"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_image_copies_only_what_the_build_context_holds():
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied |= set(line.split()[1:-1])
    assert copied == kept


def services() -> dict:
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]


def test_a_profile_starts_one_ragflash_and_the_other_one_has_the_cards():
    cpu, gpu = services()["ragflash"], services()["ragflash-gpu"]
    assert (cpu.pop("profiles"), gpu.pop("profiles")) == (["cpu"], ["gpu"])
    (device,) = gpu.pop("deploy")["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert cpu == gpu


def test_ragflash_has_no_rights_and_is_reached_from_this_machine_alone():
    ragflash = services()["ragflash"]
    assert ragflash["ports"] == ["127.0.0.1:8000:8000"]
    assert ragflash["user"] == "10001:10001"
    assert ragflash["read_only"] is True
    assert ragflash["tmpfs"] == ["/tmp"]
    assert ragflash["cap_drop"] == ["ALL"]
    assert ragflash["security_opt"] == ["no-new-privileges:true"]


def test_a_model_of_ones_own_is_seen_and_handed_on():
    ragflash = services()["ragflash"]
    assert "${MODELS_DIR:-./models}:/models:ro" in ragflash["volumes"]
    assert ragflash["environment"]["RAGFLASH_MODEL"] is None


def test_ragflash_waits_for_its_vector_server_and_knows_the_way():
    ragflash, qdrant = services()["ragflash"], services()["qdrant"]
    assert ragflash["depends_on"]["qdrant"]["condition"] == "service_healthy"
    assert ragflash["environment"]["RAGFLASH_QDRANT_URL"] == "http://qdrant:6333"
    own = ragflash["environment"]["RAGFLASH_QDRANT_API_KEY"]
    assert own.startswith("${RAGFLASH_QDRANT_API_KEY:?")
    assert qdrant["environment"]["QDRANT__SERVICE__API_KEY"] == own


def test_the_vector_server_is_pinned_kept_and_not_published():
    qdrant = services()["qdrant"]
    assert "ports" not in qdrant
    assert qdrant["volumes"] == ["vectors:/qdrant/storage"]
    image, version = qdrant["image"].split(":v")
    assert image == "qdrant/qdrant"
    assert is_compatible(importlib.metadata.version("qdrant-client"), version)


def test_every_variable_that_compose_asks_for_is_in_the_example():
    asked = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
    handed_on = {name for name, value in services()["ragflash"]["environment"].items() if not value}
    given = re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert asked | handed_on == set(given)


def test_the_example_needs_nothing_but_keys():
    lines = (ROOT / ".env.example").read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    assert {name for name, _, value in pairs if not value} == {
        "RAGFLASH_API_KEY",
        "RAGFLASH_QDRANT_API_KEY",
    }


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_the_health_check_reads_the_status(status, expected):
    _, *command = services()["qdrant"]["healthcheck"]["test"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        script = command[-1].replace("6333", str(listener.getsockname()[1]))
        check = subprocess.Popen([*command[:-1], script], stdout=subprocess.DEVNULL)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(4096).startswith(b"GET /readyz HTTP/1.0\r\n")
            connection.sendall(f"HTTP/1.0 {status} Some words\r\n\r\nwords".encode())
        assert check.wait(30) == expected
