"""The two real models answer through the chat route; one of them brings no template."""

from pathlib import Path

from ragflash.engine.build import start_engine
from tests.api.fakes import World


def reply(path: Path, question: str) -> dict:
    engine = start_engine(path, kv_bytes=128 << 20, threads=2)
    try:
        world = World()
        world.services.provide_engine(engine, world.answerer)
        messages = [{"role": "user", "content": question}]
        payload = {"model": "ragflash", "messages": messages, "max_tokens": 12, "temperature": 0}
        sent = world.send("POST", "/v1/chat/completions", json=payload)
        assert sent.status_code == 200, sent.text
        world.library.close()
        return sent.json()
    finally:
        engine.close()


def test_smollm2_answers_by_its_own_template(packaged_model_path):
    body = reply(packaged_model_path, "What is the capital of France?")
    assert body["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert body["engine"]["template"] == "model file"
    assert body["engine"]["architecture"] == "llama"


def test_gemma_answers_by_the_template_of_its_family(gemma_model_path):
    """A base model: what it says is not to the point, that it says something is."""
    body = reply(gemma_model_path, "The capital of France is")
    assert body["choices"][0]["message"]["content"].strip()
    assert body["usage"]["completion_tokens"] > 1
    assert body["engine"]["template"] == "built-in gemma3"
    assert body["engine"]["architecture"] == "gemma3"
