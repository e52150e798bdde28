"""The step: prefill, decoding, verification of drafts and scoring are one forward.

Knows nothing of threads and clients; `worker` calls it.
"""

import logging
from bisect import bisect_right
from collections.abc import Sequence as Run
from dataclasses import asdict, dataclass

import torch

from ragflash.engine.batch import Rows
from ragflash.engine.chooser import Chooser, Predicted
from ragflash.engine.file_tier import FileTier
from ragflash.engine.job import Job
from ragflash.engine.output import Output
from ragflash.engine.request import (
    Delta,
    DraftMode,
    Event,
    FinishReason,
    GenerateRequest,
    PrefillProgress,
)
from ragflash.engine.runner import Runner
from ragflash.engine.scheduler import PlannedRows, Scheduler
from ragflash.engine.sequence import DrafterFactory, Phase, Sequence
from ragflash.engine.stats import EngineStats, Totals
from ragflash.engine.tokens import Tokenizer
from ragflash.errors import EngineOverloaded, GenerationCancelled, RagflashError
from ragflash.kvcache.allocator import PagesExhausted
from ragflash.kvcache.segments import SegmentStore
from ragflash.speculative.drafter import Draft
from ragflash.speculative.verify import permitted, verify

_log = logging.getLogger(__name__)

_NO_DRAFT = Draft((), "none")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the worker knows of the tokenizer."""

    token_bytes: tuple[bytes, ...]
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Read a tokenizer's."""
        token_ids = range(tokenizer.vocab_size)
        return cls(tuple(map(tokenizer.token_bytes, token_ids)), tokenizer.stop_ids)


class EngineCore:
    """Everything between a job and its events, one step at a time.

    Args:
        runner: The model.
        scheduler: Queue and slots.
        store: Of segments.
        identity: All that stored keys and values depend on but tokens.
        vocabulary: Bytes of tokens, and those that end an answer.
        drafter_factory: Makes a sequence's drafter; `None` decodes plainly.
        draft_tokens: Most drafted tokens of a sequence in a step, after one row that is not.
        files: Takes what is stored, so that it outlives the process.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        store: SegmentStore,
        identity: str,
        vocabulary: Vocabulary,
        drafter_factory: DrafterFactory | None = None,
        draft_tokens: int = 15,
        files: FileTier | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._store = store
        self._identity = identity
        self._vocabulary = vocabulary
        self._drafter_factory = drafter_factory
        self._draft_tokens = draft_tokens
        self._files = files
        self._totals = Totals()
        self._dropped: set[str] = set()
        self._unsent: list[tuple[Job, Event]] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be computed before something new comes."""
        return self._scheduler.is_resting

    def stats(self, num_handed_over: int = 0) -> EngineStats:
        """Look at the engine, from any thread; `num_handed_over` jobs are not added yet."""
        scheduler, totals = self._scheduler, self._totals
        num_waiting = len(scheduler.waiting)
        return EngineStats(
            queued=num_handed_over + num_waiting,
            waiting=num_waiting,
            running=len(scheduler.running),
            forward_steps=self._runner.num_forwards,
            forward_rows=self._runner.num_rows,
            segments=len(self._store),
            pages_used=scheduler.num_pages_used,
            pages=scheduler.num_pages,
            evictions=self._store.num_evicted,
            **asdict(totals),
        )

    def hold(self, change: int) -> None:
        """See `Scheduler.hold`."""
        self._scheduler.hold(change)

    def stored_bytes(self) -> dict[bytes, int]:
        """Bytes of pages and state that each stored segment adds to those before it, by key."""
        stored = {segment.key: segment for segment in self._store.stored()}
        return {
            key: self._runner.segment_bytes(segment, stored.get(segment.parent))
            for key, segment in stored.items()
        }

    def add(self, job: Job) -> None:
        """Queue a job."""
        output, request = None, job.request
        if isinstance(request, GenerateRequest):
            output = Output(
                max_tokens=job.max_tokens,
                stop=request.stop,
                cursor=job.cursor,
                stop_ids=self._vocabulary.stop_ids,
                token_bytes=self._vocabulary.token_bytes,
                num_top=request.top_logprobs if request.logprobs else None,
            )
        sequence = Sequence(job, output)
        self._runner.prepare(sequence)
        is_drafted = isinstance(request, GenerateRequest) and request.draft is not DraftMode.OFF
        if is_drafted and self._drafter_factory is not None:
            sequence.drafter = self._drafter_factory(sequence)
        self._scheduler.add(sequence)

    def step(self) -> None:
        """Advance every running sequence by one forward.

        Who waits for events takes this process's time, so a model elsewhere goes on first.
        """
        self._drop_cancelled()
        self._admit()
        step = [self._draft(planned) for planned in self._scheduler.plan()]
        if step:
            predicted = self._runner.forward(step, self._tell)
            paths = self._verify_and_sample(step, predicted)
            for rows, path in zip(step, paths, strict=True):
                self._commit(rows, path)
                self._emit(rows.sequence)
        if self.is_idle or not (step and self._runner.is_elsewhere):
            self._tell()

    def drop_source(self, source_id: str) -> int:
        """Forget stored segments with text of a document, and never store one again.

        A request may be on its way that was prepared before; so the id is remembered for good.
        """
        self._dropped.add(source_id)
        if self._files is not None:
            self._files.drop_source(source_id)
        return self._store.drop_source(source_id)

    def fail_all(self, error: RagflashError) -> None:
        """End every request in flight by an error; the engine is not used afterwards."""
        for sequence in [*self._scheduler]:
            self._retire(sequence, sequence.fail(error))
        self._tell()
        if self._files is not None:
            self._files.close()

    def _drop_cancelled(self) -> None:
        for sequence in [*self._scheduler]:
            if sequence.job.cancelled.is_set():
                error = GenerationCancelled(f"request {sequence.id} was cancelled")
                self._retire(sequence, sequence.fail(error))

    def _admit(self) -> None:
        while self._scheduler.waiting:
            first = self._scheduler.waiting[0]
            try:
                admitted = self._scheduler.admit()
            except EngineOverloaded as error:
                self._send(first, first.fail(error))
                continue
            if admitted is None:
                break
            self._runner.start(admitted)
            self._save(admitted)
            admitted.force()
            self._emit(admitted)

    def _draft(self, planned: PlannedRows) -> Rows:
        """Complete pending rows by a draft, or lay out the target that is scored next."""
        sequence = planned.sequence
        if sequence.output is None and sequence.phase is Phase.DECODING:
            return self._lay_out_target(planned)
        start = sequence.committed
        pending = tuple(sequence.tokens[start : start + planned.num_rows])
        is_all = start + planned.num_rows == len(sequence.tokens)
        if not is_all or sequence.output is None or sequence.output.max_tokens == 0:
            return Rows(sequence, pending, ())
        draft = self._propose(sequence, len(pending))
        num_drafted = 0 if draft is None else len(draft)
        logit_rows = tuple(range(len(pending) - 1, len(pending) + num_drafted))
        token_ids = pending if draft is None else pending + draft.token_ids
        return Rows(sequence, token_ids, logit_rows, num_draft=num_drafted, draft=draft)

    def _lay_out_target(self, planned: PlannedRows) -> Rows:
        """Lay out the next rows of a target: each gives the probability of the token after it."""
        sequence = planned.sequence
        assert sequence.target is not None
        start = sequence.num_target_rows
        inputs = (sequence.tokens[-1], *sequence.target[:-1])
        token_ids = inputs[start : start + planned.num_rows]
        num_rows = len(token_ids)
        return Rows(sequence, token_ids, tuple(range(num_rows)), num_draft=num_rows)

    def _propose(self, sequence: Sequence, num_pending: int) -> Draft | None:
        """Ask the drafter, and cut its proposal where no output could follow it."""
        output = sequence.output
        assert output is not None
        most_rows = min(1 + self._draft_tokens, sequence.room)
        budget = min(most_rows - num_pending, output.num_left - 1)
        if sequence.drafter is None or budget <= 0:
            return None
        draft = sequence.drafter.propose(sequence.tokens, budget).first(budget)
        num_tokens = len(self._vocabulary.token_bytes)
        draft = draft.without(
            {at for at, token_id in enumerate(draft.token_ids) if not 0 <= token_id < num_tokens}
        )
        return draft if output.cursor is None else permitted(draft, output.cursor.num_permitted)

    def _verify_and_sample(self, step: Run[Rows], predicted: Predicted) -> list[Run[int]]:
        """Turn predictions into output; return which rows of each sequence are part of it."""
        paths, start = [], 0
        for rows in step:
            end = start + len(rows.logit_rows)
            paths.append(self._extend(rows, predicted[start:end]))
            start = end
        return paths

    def _extend(self, rows: Rows, predicted: Predicted) -> Run[int]:
        sequence = rows.sequence
        if not rows.logit_rows:
            return range(len(rows.token_ids))
        if sequence.output is None:
            assert isinstance(predicted, torch.Tensor)
            return range(self._score(sequence, predicted))
        chooser = Chooser(sequence, predicted)
        accepted = verify(rows.draft or _NO_DRAFT, chooser.choose, chooser.emit)
        if rows.draft is not None and sequence.drafter is not None:
            sequence.drafter.observe(rows.draft, accepted)
            sequence.drafts.count(rows.draft, accepted)
        sequence.force()
        return [*range(rows.num_pending), *(rows.num_pending + index for index in accepted)]

    def _score(self, sequence: Sequence, logits: torch.Tensor) -> int:
        """Take a target's next rows; return how many to commit: all if more follow, else none."""
        assert sequence.target is not None
        start, num_rows = sequence.num_target_rows, len(logits)
        logprob = _logprob(logits, sequence.target[start : start + num_rows])
        return num_rows if sequence.add_score(logprob, num_rows) else 0

    def _commit(self, rows: Rows, path: Run[int]) -> None:
        """Make valid rows part of the sequence, and keep a prompt segment that ends with them."""
        sequence = rows.sequence
        assert sequence.cache is not None
        was_prefilling = sequence.phase is Phase.PREFILLING
        if path:
            self._runner.commit(rows, path)
        sequence.settle()
        if was_prefilling:
            self._store_segment(sequence)
            done = min(sequence.committed, sequence.num_prompt)
            self._send(sequence, [PrefillProgress(sequence.id, done, sequence.num_prompt)])

    def _store_segment(self, sequence: Sequence) -> None:
        index = sequence.segment_ending_at(sequence.committed)
        if index is None or not sequence.job.request.cache or sequence.cache is None:
            return
        seconds = sequence.end_segment()
        segments = sequence.job.prompt.segments[: index + 1]
        if not all(self._dropped.isdisjoint(segment.source_ids) for segment in segments):
            return
        try:
            pending = self._store.begin(
                [segment.token_ids for segment in segments],
                identity=self._identity,
                namespace=sequence.job.request.namespace,
                table=sequence.cache.table,
                state=self._runner.snapshot(sequence.cache),
                parts=self._runner.parts(sequence),
                source_ids=segments[-1].source_ids,
                prefill_seconds=seconds,
            )
        except PagesExhausted:
            fields = {"request_id": sequence.job.trace, "generation": sequence.id}
            _log.info("segment not stored: no page is free", extra=fields)
            return
        if pending is not None:
            self._runner.fill(pending)
            self._store.commit(pending)
            self._save(sequence)

    def _save(self, sequence: Sequence) -> None:
        """Have all segments written that the cache has and files have not, or not any more."""
        segments = sequence.archived_segments[: bisect_right(sequence.ends, sequence.committed)]
        if self._files is not None and segments and sequence.job.request.cache:
            self._files.save(segments, sequence.job.request.namespace)

    def _emit(self, sequence: Sequence) -> None:
        """Send new text, and the end when it is reached."""
        output = sequence.output
        if output is None:
            if sequence.target is None:
                self._retire(sequence, sequence.finish(FinishReason.SCORED))
            elif sequence.must_restart:
                self._scheduler.restart(sequence)
            return
        if output.max_tokens == 0 and sequence.phase is Phase.DECODING:
            output.end(FinishReason.LENGTH)
        text = output.take_text()
        if text:
            self._send(sequence, [Delta(sequence.id, text, output.take_logprobs())])
        if output.reason is not None:
            self._retire(sequence, sequence.finish(output.reason))

    def _retire(self, sequence: Sequence, events: Run[Event]) -> None:
        self._scheduler.retire(sequence)
        self._send(sequence, events)

    def _send(self, sequence: Sequence, events: Run[Event]) -> None:
        for event in events:
            self._totals.count(event)
            self._unsent.append((sequence.job, event))

    def _tell(self) -> None:
        """Send the events that were kept until now."""
        unsent, self._unsent = self._unsent, []
        for job, event in unsent:
            job.emit(event)


def _logprob(logits: torch.Tensor, target: Run[int]) -> float:
    """Sum the log-probabilities of `target` under rows of logits `[len(target), V]`."""
    ids = torch.tensor(target, dtype=torch.int64, device=logits.device)
    rows = torch.log_softmax(logits.float(), dim=-1)
    return float(rows.gather(1, ids[:, None]).double().sum())
