"""The engine as everyone else sees it: requests in, events out, from an asyncio program.

Rendering, tokenising and compiling constraints happen on threads of the caller; the worker gets
numbers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING

from ragflash.engine.constrain import ConstraintCompiler
from ragflash.engine.drafting import Drafting, refuse_drafts
from ragflash.engine.job import Job
from ragflash.engine.prompt import CompiledPrompt, begins_alike, compile_prompt, compile_text
from ragflash.engine.request import (
    ChatMessage,
    EngineInfo,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Request,
    SamplingParams,
    Scored,
    ScoreRequest,
)
from ragflash.engine.stats import EngineStats
from ragflash.engine.tokens import Template, Tokenizer
from ragflash.errors import ContextTooLong, EngineDead, InputError
from ragflash.speculative.lookup import LookupDrafter

if TYPE_CHECKING:
    from ragflash.engine.worker import Worker  # imports torch

_log = logging.getLogger(__name__)


class EngineClient:
    """A running engine. Methods may be called from any event loop and thread.

    Args:
        worker: The thread that owns the model; closed with the client.
        tokenizer: The model's.
        template: The model's.
        info: Said with every reply; its `context_tokens` is what prompts are held to.
        drafting: `None` where the engine does not draft.
    """

    def __init__(
        self,
        worker: "Worker",
        tokenizer: Tokenizer,
        template: Template,
        info: EngineInfo,
        drafting: Drafting | None = None,
    ) -> None:
        self._worker = worker
        self._drafting = drafting
        self._tokenizer = tokenizer
        self._template = template
        self._info = info
        self._token_bytes = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
        self._constraints = ConstraintCompiler(tokenizer, self._token_bytes)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._worker.is_alive

    def info(self) -> EngineInfo:
        """Return what a reply says about the engine."""
        return self._info

    @property
    def lookup_tokenizer(self) -> Tokenizer | None:
        """Cuts documents that drafts are copied from; `None` where the engine does not draft."""
        return None if self._drafting is None else self._tokenizer

    def stats(self) -> EngineStats:
        """Return what the engine has done and is doing."""
        return self._worker.stats()

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Cut plain text into tokens."""
        return tuple(self._tokenizer.encode(text))

    def count_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """Count the prompt tokens of messages, generation prompt included."""
        return len(self._compile(messages).sources.source)

    def begins_alike(self, request: GenerateRequest, num_segments: int) -> bool:
        """Whether the template writes a request's first segments as it does those alone.

        If so, all requests that begin with them share what is stored of them, whatever follows and
        whatever the template is told besides.

        Raises:
            InputError: The template refuses the messages.
            TemplateInvalid: It fails, or does not keep them in order.
        """
        variables = dict(request.variables)
        return begins_alike(request.messages, self._template, variables, num_segments)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield a request's events, `Finished` or `Failed` last; closing the iterator cancels it.

        Raises:
            InputError: The request cannot be served; nothing was computed.
            ContextTooLong: Its prompt leaves no room for an answer.
            EngineOverloaded: Too many requests are in flight.
            EngineDead: The engine has stopped.
        """
        submitted_at = time.perf_counter()
        events: asyncio.Queue[Event] = asyncio.Queue()
        emit = _into(events, asyncio.get_running_loop())
        job = await asyncio.to_thread(self._prepare, request, emit, submitted_at)
        self._worker.submit(job)
        try:
            while True:
                event = await events.get()
                yield event
                if isinstance(event, Finished | Failed):
                    return
        finally:
            job.cancelled.set()

    async def complete(self, request: GenerateRequest) -> Finished:
        """Return the end of a request; raises its error, or what `generate` raises."""
        return (await self._all(request))[1]

    async def score(self, request: ScoreRequest) -> Scored:
        """Return the targets' log-probabilities; raises its error, or what `generate` raises."""
        scored, _ = await self._all(request)
        assert scored is not None
        return scored

    async def drop_source(self, source_id: str) -> int:
        """Forget all stored segments with text of a document; return how many there were.

        Requests under way, and those to come, store none either: an id must not be used again.
        """
        self._constraints.forget_texts()
        if self._drafting is not None:
            self._drafting.forget_texts()
        return await asyncio.wrap_future(self._worker.drop_source(source_id))

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of memory that stored prompt segments take, by key in hexadecimal digits; blocks.

        What two segments share counts for the first; a key is the id of the segment's file.

        Raises:
            EngineDead: The engine has stopped.
        """
        return {key.hex(): size for key, size in self._worker.stored_bytes().result().items()}

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Keep background requests from running, for work whose own requests come one by one.

        Raises:
            EngineDead: The engine has stopped.
        """
        self._worker.hold(1)
        try:
            yield
        finally:
            with suppress(EngineDead):
                self._worker.hold(-1)

    def close(self) -> None:
        """Cancel what is in flight, end the worker, and keep what drafts have done."""
        self._worker.close()
        if self._drafting is not None:
            self._drafting.learned.save()

    async def _all(self, request: Request) -> tuple[Scored | None, Finished]:
        scored = None
        async with aclosing(self.generate(request)) as events:
            async for event in events:
                match event:
                    case Scored():
                        scored = event
                    case Finished():
                        return scored, event
                    case Failed():
                        raise event.error
        raise EngineDead("the engine ended a request without saying how")

    def _compile(
        self, messages: Sequence[ChatMessage], variables: Iterable[tuple[str, object]] = ()
    ) -> CompiledPrompt:
        return compile_prompt(messages, self._template, self._tokenizer, dict(variables))

    def _prepare(self, request: Request, emit: Callable[[Event], None], submitted_at: float) -> Job:
        if isinstance(request, ScoreRequest) and request.text:
            prompt = compile_text(request.text, self._tokenizer)
        else:
            variables = request.variables if isinstance(request, GenerateRequest) else ()
            prompt = self._compile(request.messages, variables)
        cursor, max_tokens = None, 0
        targets: tuple[tuple[int, ...], ...] = ()
        if isinstance(request, GenerateRequest):
            max_tokens = self._clamped(prompt, request.max_tokens)
            self._check_bias(request.sampling)
            if request.keep_prompt:
                prompt = prompt.with_last_token_apart()
            if request.constraint is not None:
                cursor = self._constraints.compile(request.constraint, prompt)
        else:
            targets = self._targets(prompt, request)
        lookup = self._lookup(prompt, request)
        return Job(request, prompt, max_tokens, cursor, targets, emit, submitted_at, lookup)

    def _lookup(self, prompt: CompiledPrompt, request: Request) -> LookupDrafter | None:
        if self._drafting is not None:
            return self._drafting.prepare(prompt, request)
        refuse_drafts(request)
        return None

    def _clamped(self, prompt: CompiledPrompt, max_tokens: int) -> int:
        if max_tokens < 0:
            raise InputError(f"max_tokens = {max_tokens} is negative")
        return min(max_tokens, self._room(prompt, 1))

    def _check_bias(self, sampling: SamplingParams) -> None:
        for token_id, _ in sampling.logit_bias:
            if not 0 <= token_id < len(self._token_bytes):
                raise InputError(
                    f"logit_bias names token {token_id}; the model's are 0 to "
                    f"{len(self._token_bytes) - 1}"
                )

    def _targets(
        self, prompt: CompiledPrompt, request: ScoreRequest
    ) -> tuple[tuple[int, ...], ...]:
        targets = tuple(self.tokenize(text) for text in request.targets)
        if not targets or not all(targets):
            raise InputError("every text to score needs at least one token, and there must be one")
        self._room(prompt, max(map(len, targets)))
        return targets

    def _room(self, prompt: CompiledPrompt, num_needed: int) -> int:
        """Return the tokens that a prompt leaves; raises `ContextTooLong` for fewer than needed."""
        num_prompt, limit = len(prompt.sources.source), self._info.context_tokens
        if num_prompt + num_needed > limit:
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens and needs room for {num_needed} more; "
                f"the context is {limit} tokens: shorten the documents or the question",
                prompt_tokens=num_prompt,
                limit_tokens=limit,
            )
        return limit - num_prompt


def _into(events: asyncio.Queue[Event], loop: asyncio.AbstractEventLoop) -> Callable[[Event], None]:
    """Return a function that puts events into a loop's queue from another thread."""

    def emit(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:  # the loop was closed: nobody is left to read
            _log.debug("event dropped", extra={"request_id": event.request_id})

    return emit
