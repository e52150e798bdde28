"""Askers side by side, who give up, delete documents, and look closely at every answer."""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import aclosing

from ragflash.engine.client import EngineClient
from ragflash.engine.request import DraftMode, Finished, GenerateRequest
from ragflash.sessions import SessionFolder
from tests.engine.toys import ask
from tests.soak.marked import RULES, MarkedDocument, answer_to, make_document

DELETED_REMEMBERED = 32
MOST_ACTS = 2_000  # when something has not happened yet after so many
KINDS = frozenset({"none", "device", "file", "cancelled", "deleted", "asked deleted"})


class Askers:
    """All that is going on at one engine, in one event loop.

    Attributes:
        counts: Of answers by tier, of what was cancelled, deleted and asked of deleted documents.
        deleted: Documents that are gone, the last ones.
    """

    def __init__(
        self,
        engine: EngineClient,
        folder: SessionFolder,
        *,
        num_documents: int,
        seed: int = 0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.deleted: deque[MarkedDocument] = deque(maxlen=DELETED_REMEMBERED)
        self._engine = engine
        self._folder = folder
        self._chance = random.Random(seed)
        self._num_made = 0
        self._documents = [self._make() for _ in range(num_documents)]

    async def run(self, num_askers: int, seconds: float, after_each: Callable[[], None]) -> None:
        """Go on for some time, and until everything happened; raises for the first wrong answer."""
        deadline = time.monotonic() + seconds

        def is_over() -> bool:
            is_late = time.monotonic() >= deadline
            return is_late and (self.counts.keys() >= KINDS or self.counts.total() > MOST_ACTS)

        async def asker() -> None:
            while not is_over():
                await self._act()
                after_each()

        async with asyncio.TaskGroup() as group:
            for _ in range(num_askers):
                group.create_task(asker())

    async def _act(self) -> None:
        drawn = self._chance.random()
        if drawn < 0.03:
            await self._delete()
        elif drawn < 0.10 and self.deleted:
            await self._ask_deleted(self._chance.choice(self.deleted))
        elif drawn < 0.25:
            await self._ask_and_give_up()
        else:
            documents = self._chance.sample(self._documents, self._chance.choice((1, 1, 1, 2)))
            finished = await self._answer(documents)
            self.counts[str(finished.tier)] += 1

    async def _answer(self, documents: Sequence[MarkedDocument]) -> Finished:
        request, wanted = self._request(documents)
        finished = await self._engine.complete(request)
        assert finished.text == wanted, (finished.text, wanted, finished.tier, request.id)
        return finished

    async def _ask_and_give_up(self) -> None:
        """Leave before the prompt is computed, within it, or within the answer."""
        request, wanted = self._request(self._chance.sample(self._documents, 1))
        left, said = self._chance.randint(0, 8), ""
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                said += getattr(event, "text", "") if not isinstance(event, Finished) else ""
                assert wanted.startswith(said)
                left -= 1
                if left < 0:
                    break
        self.counts["cancelled"] += 1

    async def _delete(self) -> None:
        """Erase what was just used as the library does, files first; then ask about it at once."""
        at = self._chance.randrange(len(self._documents))
        gone, self._documents[at] = self._documents[at], self._make()
        await self._answer([gone])
        await asyncio.to_thread(self._folder.delete_source, gone.source_id)
        await self._engine.drop_source(gone.source_id)
        self.counts["deleted"] += 1
        self.deleted.append(gone)
        await self._ask_deleted(gone)

    async def _ask_deleted(self, gone: MarkedDocument) -> None:
        """Whoever still sends the text of a deleted document has it computed, each time."""
        others = self._chance.sample(self._documents, self._chance.choice((0, 1)))
        finished = await self._answer([gone, *others])
        assert finished.usage.cached_tokens <= len(RULES.text), "answered from a deleted document"
        self.counts["asked deleted"] += 1

    def _request(self, documents: Sequence[MarkedDocument]) -> tuple[GenerateRequest, str]:
        """Ask for a mark of one of them; return the answer that is right, too."""
        number = self._chance.randrange(sum(len(each.marks) for each in documents))
        question = f" {self._chance.randrange(10)} is the mark {number}?"
        segments = (RULES, *(each.segment for each in documents))
        mode = self._chance.choice((DraftMode.OFF, DraftMode.AUTO))
        name = " ".join(f"{each.number}" for each in documents)
        request = ask(question, *segments, name=name, max_tokens=40, draft=mode)
        wanted = answer_to("".join(each.text for each in segments) + question)
        assert wanted[:16] == [mark for each in documents for mark in each.marks][number]
        return request, wanted

    def _make(self) -> MarkedDocument:
        self._num_made += 1
        return make_document(self._num_made)
