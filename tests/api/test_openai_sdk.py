"""The official client against a real server on loopback."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest
import uvicorn

from ragflash.engine.logprobs import Candidate, TokenLogprob
from ragflash.engine.request import Delta, Failed
from ragflash.errors import ContextTooLong, EngineDead, EngineOverloaded
from tests.api.fakes import CONFIG, World, finished, spoken

KEY = "correct-horse-battery"
HELLO = [{"role": "user", "content": "Hello"}]


class Server(uvicorn.Server):
    """A server that says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @property
    def port(self) -> int:
        return self.servers[0].sockets[0].getsockname()[1]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[World, openai.OpenAI]]:
    world = World(replace(CONFIG, api_key=KEY))
    config = uvicorn.Config(world.app, host="127.0.0.1", port=0, log_config=None)
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.listening.wait(10)
    base_url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        yield world, client
    server.should_exit = True
    thread.join(10)
    world.library.close()


@pytest.fixture
def world(served: tuple[World, openai.OpenAI]) -> World:
    served[0].engine.script = spoken("Seven", " years 🧾.")
    return served[0]


@pytest.fixture
def client(served: tuple[World, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def stream(client: openai.OpenAI, **options):
    return client.chat.completions.create(model="ragflash", messages=HELLO, stream=True, **options)


def test_plain(world: World, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="ragflash", messages=HELLO, temperature=0)
    assert reply.choices[0].message.content == "Seven years 🧾."
    assert reply.usage.prompt_tokens_details.cached_tokens == 10


def test_stream(world: World, client: openai.OpenAI) -> None:
    chunks = list(stream(client, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Seven years 🧾."
    assert chunks[-1].usage.total_tokens == 44


def test_stream_helper_accumulates(world: World, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="ragflash", messages=HELLO) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == "Seven years 🧾."
    assert final.choices[0].finish_reason == "stop"


def test_log_probabilities_and_choices(world: World, client: openai.OpenAI) -> None:
    told = TokenLogprob(
        Candidate(7, b"Seven", -0.25), (Candidate(7, b"Seven", -0.25), Candidate(9, b"", -1.5))
    )
    end = TokenLogprob(Candidate(9, b"", -0.5), ())
    last = replace(finished("Seven"), logprobs=(told, end), num_shown=1)
    world.engine.script = [Delta("r", "Seven", (told,)), last]
    asked = {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model="ragflash", messages=HELLO, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.completion_tokens == 8
    (token,) = whole.choices[1].logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("Seven", -0.25, list(b"Seven"))
    assert [(other.token, other.bytes) for other in token.top_logprobs] == [
        ("Seven", list(b"Seven")),
        ("", None),
    ]
    with client.chat.completions.stream(model="ragflash", messages=HELLO, **asked) as events:
        streamed = events.get_final_completion()
    for index, choice in enumerate(streamed.choices):
        assert choice.message.content == "Seven"
        assert choice.finish_reason == "stop"
        assert choice.logprobs.content == whole.choices[index].logprobs.content


def test_models(world: World, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["ragflash"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_errors_have_their_classes(world: World, client: openai.OpenAI) -> None:
    too_long = ContextTooLong("too long", prompt_tokens=9000, limit_tokens=2048)
    world.engine.script = [too_long]
    with pytest.raises(openai.BadRequestError) as caught:
        stream(client)
    assert caught.value.code == "context_length_exceeded"
    world.engine.script = [EngineOverloaded("the queue is full")]
    with pytest.raises(openai.RateLimitError) as limited:
        client.chat.completions.create(model="ragflash", messages=HELLO)
    assert limited.value.response.headers["retry-after"] == "2"
    assert limited.value.request_id
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong-key").models.list()


def test_a_stream_that_breaks_raises(world: World, client: openai.OpenAI) -> None:
    world.engine.script = [Delta("r", "Sev"), Failed("r", EngineDead("the worker has ended"))]
    received = []
    with pytest.raises(openai.APIError, match="the worker has ended"):
        received.extend(chunk.choices[0].delta.content for chunk in stream(client) if chunk.choices)
    assert world.engine.running == 0


def test_leaving_a_stream_cancels_and_the_next_request_is_served(
    world: World, client: openai.OpenAI
) -> None:
    stopped = threading.Event()

    class Watched(list):
        def __iter__(self):
            yield Delta("r", "Sev")
            yield 60.0

    world.engine.script = Watched()
    original = world.engine.play

    async def play():
        try:
            async for event in original():
                yield event
        finally:
            stopped.set()

    world.engine.play = play
    with stream(client) as events:
        assert next(iter(events)).choices[0].delta.role == "assistant"
    assert stopped.wait(5)
    world.engine.play = original
    world.engine.script = spoken("Next.")
    reply = client.chat.completions.create(model="ragflash", messages=HELLO)
    assert reply.choices[0].message.content == "Next."
