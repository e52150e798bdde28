import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from ragflash.api.deps import Services
from ragflash.cli import serve
from ragflash.cli.output import Output
from ragflash.errors import ModelMissing
from ragflash.settings import load_settings


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> Iterator[None]:
    """Leave pytest's own log handlers and signals alone."""
    monkeypatch.setattr("ragflash.log.configure", lambda level, style: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def arrived(monkeypatch) -> dict[str, threading.Event]:
    """Set when the server has got its library and its engine."""
    events = {"library": threading.Event(), "engine": threading.Event()}
    for part, event in events.items():
        provide = getattr(Services, f"provide_{part}")

        def provide_and_tell(*parts, provide=provide, event=event) -> None:
            provide(*parts)
            event.set()

        monkeypatch.setattr(Services, f"provide_{part}", provide_and_tell)
    return events


class Visitor(threading.Thread):
    """Visits the server from another thread, then sends the process a signal."""

    def __init__(self, visit: Callable[[httpx.Client], None], number: int) -> None:
        super().__init__()
        self.invited = threading.Event()
        self.address = ""
        self.failure: Exception | None = None
        self._visit = visit
        self._number = number

    def invite(self, text: str) -> None:
        self.address = text.rpartition(" ")[2]
        self.invited.set()

    def run(self) -> None:
        if not self.invited.wait(10):
            return
        try:
            with httpx.Client(base_url=self.address) as client:
                self._visit(client)
        except (AssertionError, httpx.HTTPError) as error:
            self.failure = error
        finally:
            os.kill(os.getpid(), self._number)


def run_server(monkeypatch, visit, number: int = signal.SIGINT) -> None:
    visitor = Visitor(visit, number)
    monkeypatch.setattr(Output, "complain", visitor.invite)
    visitor.start()
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected):
        serve.run(load_settings(port=0), Output(as_json=False))
    visitor.join(10)
    if visitor.failure is not None:
        raise visitor.failure


def test_it_serves_and_ends_cleanly_on_ctrl_c(monkeypatch, arrived, engine) -> None:
    def visit(client: httpx.Client) -> None:
        assert arrived["engine"].wait(10)
        assert client.get("/readyz").json()["ready"] is True
        text = {"text": "Records are kept for seven years.", "name": "law.txt"}
        added = client.post("/v1/documents", params={"wait": 10}, json=text).json()
        assert added["document"]["state"] == "ready"
        assert added["document"]["tokens"] == 6
        document_id = added["document"]["id"]
        assert client.delete(f"/v1/documents/{document_id}").status_code == 204
        assert engine.dropped == [document_id]

    run_server(monkeypatch, visit)
    assert engine.closed
    serve.open_library(load_settings()).close()


def test_a_supervisor_can_end_it_as_cleanly(monkeypatch, arrived, engine) -> None:
    def visit(client: httpx.Client) -> None:
        assert arrived["engine"].wait(10)

    run_server(monkeypatch, visit, signal.SIGTERM)
    assert engine.closed


def test_while_the_model_loads_documents_are_taken_and_chat_is_told_to_wait(
    monkeypatch, arrived, engine
) -> None:
    loaded = threading.Event()

    def load(settings, archive):
        assert loaded.wait(10)
        return engine

    monkeypatch.setattr("ragflash.cli.model_host.start_model", load)

    def visit(client: httpx.Client) -> None:
        try:
            assert client.get("/healthz").status_code == 200
            assert arrived["library"].wait(10)
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["missing"]) == (503, ["engine"])
            text = {"text": "Records are kept for seven years."}
            assert client.post("/v1/documents", json=text).status_code == 202
            chat = client.post(
                "/v1/chat/completions",
                json={"model": "ragflash", "messages": [{"role": "user", "content": "q"}]},
            )
            assert (chat.status_code, chat.headers["retry-after"]) == (503, "5")
            assert chat.json()["error"]["code"] == "not_ready"
        finally:
            loaded.set()
        assert arrived["engine"].wait(10)
        assert client.get("/readyz").status_code == 200

    run_server(monkeypatch, visit)


def test_a_server_that_can_never_serve_ends_with_the_reason(monkeypatch) -> None:
    def load(settings, archive):
        raise ModelMissing("it was there a moment ago")

    monkeypatch.setattr("ragflash.cli.model_host.start_model", load)
    with pytest.raises(ModelMissing, match="a moment ago"):
        serve.run(load_settings(port=0), Output(as_json=False))


def test_a_taken_port_is_named_with_the_way_out(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", port)
    assert result.exit_code == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in result.stderr
    assert "--port" in result.stderr


def test_an_open_server_needs_a_key(run) -> None:
    result = run("serve", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "RAGFLASH_API_KEY" in result.stderr
