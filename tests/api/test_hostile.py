"""What no well-meaning client sends: refused with a reason, and never a fault of the server."""

from collections.abc import Iterator

import pytest

from tests.api.fakes import World
from tests.api.real_world import real_world
from tests.rag.conftest import TextParser

CHAT = '{"model":"ragflash","messages":[{"role":"user","content":"x"}],%s}'
HALF = r"\ud800"
ONES = "1" * 5000
BODIES = {
    "half a character in a question": ("ask", f'{{"question":"{HALF} x"}}', 422),
    "half a character in a query": ("search", f'{{"query":"{HALF} x"}}', 422),
    "half a character in an id": ("search", f'{{"query":"x","documents":["{HALF}"]}}', 422),
    "half a character in a key": ("search", f'{{"query":"x","{HALF}":1}}', 422),
    "half a character in a text": ("documents", f'{{"text":"{HALF} x"}}', 422),
    "half a character in a name": ("documents", f'{{"text":"x","name":"{HALF}.txt"}}', 422),
    "half a character in a message": (
        "chat/completions",
        f'{{"model":"ragflash","messages":[{{"role":"user","content":"{HALF}"}}]}}',
        400,
    ),
    "half a character in a model": (
        "chat/completions",
        f'{{"model":"{HALF}","messages":[{{"role":"user","content":"x"}}]}}',
        400,
    ),
    "half a character in a stop": ("chat/completions", CHAT % f'"stop":"{HALF}"', 400),
    "NUL as a question": ("ask", r'{"question":"\u0000"}', 200),
    "NUL as a query": ("search", r'{"query":"\u0000 x"}', 200),
    "NUL in a name": ("documents", r'{"text":"x","name":"a\u0000.txt"}', 400),
    "NUL in an id": ("search", r'{"query":"x","documents":["\u0000"]}', 404),
    "a huge number": ("search", f'{{"query":"x","limit":{ONES}}}', 400),
    "a huge number as a text": ("documents", f'{{"text":{ONES}}}', 422),
    "a huge number of tokens": ("chat/completions", CHAT % f'"max_tokens":{ONES[:99]}', 200),
    "a huge seed": ("chat/completions", CHAT % f'"seed":{ONES[:99]}', 200),
    "a huge top_k": ("chat/completions", CHAT % f'"top_k":{ONES[:99]}', 200),
    "a temperature next to nothing": ("chat/completions", CHAT % '"temperature":1e-300', 400),
    "a temperature beyond numbers": ("chat/completions", CHAT % '"temperature":1e999', 400),
    "a temperature that is none": ("chat/completions", CHAT % '"temperature":NaN', 400),
    "a bias that is none": ("chat/completions", CHAT % '"logit_bias":{"1":NaN}', 400),
    "too many texts to stop at": (
        "chat/completions",
        CHAT % ('"stop":[' + ",".join(['"s"'] * 17) + "]"),
        400,
    ),
    "too many documents": (
        "search",
        '{"query":"x","documents":[' + ",".join(['"d"'] * 1001) + "]}",
        422,
    ),
    "not a number": ("search", '{"query":"x","limit":NaN}', 422),
    "an endless list": ("search", "[" * 100_000, 400),
    "nothing": ("ask", "", 422),
    "null": ("documents", "null", 422),
}
PATHS = {
    "/v1/documents/%00": 404,
    "/v1/documents/%ff%fe": 404,
    "/v1/documents/..%2f..%2fetc%2fpasswd": 404,
    f"/v1/documents/{'x' * 60_000}": 404,
    f"/v1/documents?after={'x' * 60_000}": 404,
    "/v1/documents?after=%00": 404,
    f"/v1/documents?limit={ONES}": 422,
    "/v1/documents?limit=1e1": 422,
    f"/v1/documents/x/text?page={ONES[:400]}": 404,
    "/v1/jobs/%ed%a0%80": 404,
    "/v1/models/%ed%a0%80": 404,
}
FORMS = {
    "a name with NUL": (b'; name="file"; filename="a\x00b"', 400),
    "a name that is no text": (b'; name="file"; filename="\xff\xfe"', 202),
    "a name in another notation": (b"; name=\"file\"; filename*=utf-8''%ed%a0%80", 422),
    "a name without end": (b'; name="file"; filename="' + b"a" * 20_000 + b'"', 400),
    "a part without a name": (b"", 400),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hostile")
    with real_world(folder, TextParser(), max_upload_bytes=100_000) as world:
        yield world


@pytest.mark.parametrize(("route", "body", "status"), BODIES.values(), ids=BODIES)
def test_bodies(real: World, route: str, body: str, status: int):
    headers = {"content-type": "application/json"}
    reply = real.send("POST", f"/v1/{route}", content=body, headers=headers)
    assert reply.status_code == status, reply.text[:300]


@pytest.mark.parametrize(("encoding", "status"), [("utf-16", 200), ("latin-1", 400)])
def test_bodies_in_other_encodings(real: World, encoding: str, status: int):
    content = '{"query":"é"}'.encode(encoding)
    headers = {"content-type": f"application/json; charset={encoding}"}
    reply = real.send("POST", "/v1/search", content=content, headers=headers)
    assert reply.status_code == status


@pytest.mark.parametrize(("path", "status"), PATHS.items(), ids=lambda value: str(value)[:40])
def test_paths(real: World, path: str, status: int):
    reply = real.send("GET", path)
    assert reply.status_code == status
    assert {"detail", "error"} & reply.json().keys()


@pytest.mark.parametrize(("disposition", "status"), FORMS.values(), ids=FORMS)
def test_forms(real: World, disposition: bytes, status: int):
    head = b"Content-Disposition: form-data" + disposition
    reply = real.send(
        "POST",
        "/v1/documents",
        content=b"--x\r\n" + head + b"\r\n\r\nSome text.\r\n--x--\r\n",
        headers={"content-type": "multipart/form-data; boundary=x"},
    )
    assert reply.status_code == status, reply.text[:300]


@pytest.mark.parametrize("kind", ["boundary=", "boundary=é", f"boundary={'x' * 500}", "charset=no"])
def test_forms_without_form(real: World, kind: str):
    headers = {"content-type": f"multipart/form-data; {kind}".encode("latin-1")}
    reply = real.send("POST", "/v1/documents", content=b"--x", headers=headers)
    assert reply.status_code == 400


def test_every_method_of_a_path_is_allowed_by_name(real: World):
    assert real.send("OPTIONS", "/v1/documents/x").headers["allow"] == "DELETE, GET"
    assert real.send("PUT", "/v1/models/x").headers["allow"] == "GET"
    assert real.send("POST", "/openapi.json").headers["allow"] == "GET, HEAD"
