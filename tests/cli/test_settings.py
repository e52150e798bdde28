import pytest

from ragflash.api.app import api_config
from ragflash.cli.parts import vram_bytes
from ragflash.errors import DeviceMissing, SettingInvalid
from ragflash.settings import Settings, is_loopback, load_settings

KEY = "correct-horse-battery"


def test_every_field_says_what_it_is_and_there_are_few() -> None:
    assert len(Settings.model_fields) <= 40
    for name, field in Settings.model_fields.items():
        assert field.description, name
        unit = next((unit for unit in ("bytes", "tokens", "_s") if name.endswith(unit)), None)
        if unit is not None:
            assert {"_s": "seconds"}.get(unit, unit) in field.description.lower(), name


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch) -> None:
    assert load_settings().port == 8000
    monkeypatch.setenv("RAGFLASH_PORT", "9000")
    assert load_settings(port=None).port == 9000
    assert load_settings(port=9001).port == 9001


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "99999"),
        ("PORT", "http"),
        ("MAX_SLOTS", "0"),
        ("DTYPE", "int3"),
        ("HEARTBEAT_S", "-1"),
        ("LOG_FORMAT", "xml"),
        ("ALLOWED_HOSTS", "not json"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"RAGFLASH_{name}", value)
    with pytest.raises(SettingInvalid, match=f"(?i){name}"):
        load_settings()


def test_a_key_is_never_shown(monkeypatch) -> None:
    monkeypatch.setenv("RAGFLASH_API_KEY", "short")
    with pytest.raises(SettingInvalid) as caught:
        load_settings()
    assert "short" not in str(caught.value).replace("should", "")
    assert KEY not in repr(load_settings(api_key=KEY))


def test_unknown_variables_are_refused_but_not_those_of_tests(monkeypatch) -> None:
    monkeypatch.setenv("RAGFLASH_TEST_STORE_URL", "http://127.0.0.1")
    load_settings()
    monkeypatch.setenv("RAGFLASH_PROT", "1")
    with pytest.raises(SettingInvalid, match="did you mean RAGFLASH_PORT"):
        load_settings()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.2", False),
        ("localhost.evil.example", False),
    ],
)
def test_loopback_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_beyond_loopback_a_key_is_needed() -> None:
    with pytest.raises(SettingInvalid, match="RAGFLASH_API_KEY"):
        api_config(load_settings(host="0.0.0.0"))
    assert api_config(load_settings(host="0.0.0.0", api_key=KEY)).api_key == KEY


def test_names_are_checked_on_loopback_and_where_listed() -> None:
    assert api_config(load_settings()).allowed_hosts == {"localhost", "127.0.0.1", "::1"}
    assert api_config(load_settings(host="0.0.0.0", api_key=KEY)).allowed_hosts is None
    listed = load_settings(host="0.0.0.0", api_key=KEY, allowed_hosts=("RAG.lan",))
    assert {"rag.lan", "localhost"} <= api_config(listed).allowed_hosts


def test_options_of_a_card_are_settings(run, law, monkeypatch) -> None:
    seen = []

    def start(settings, archive):
        seen.append(settings)
        raise DeviceMissing("that will do")

    monkeypatch.setattr("ragflash.cli.parts.start_model", start)
    options = {
        "--device": "cpu",
        "--vram": "23.5",
        "--ctx": "138696",
        "--kv": "tq3_0",
        "--slots": "2",
        "--verify-rows": "16",
    }
    given = [word for option in options.items() for word in option]
    result = run("ask", "How long are records kept?", "--file", law, *given)
    assert (result.exit_code, result.stderr) == (1, "error: that will do\n")
    (settings,) = seen
    assert (settings.device, settings.vram_gb, settings.context_tokens) == ("cpu", 23.5, 138_696)
    assert (settings.kv_format, settings.max_slots, settings.verify_rows) == ("tq3_0", 2, 16)
    assert vram_bytes(settings) == int(23.5 * 2**30)
    assert run("ask", "How long?", "--file", law, "--kv", "q3").exit_code == 2
