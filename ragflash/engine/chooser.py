"""Picks the tokens of one sequence from the logits of a step."""

import torch

from ragflash.engine import sampler
from ragflash.engine.logprobs import Candidate, TokenLogprob
from ragflash.engine.sequence import Sequence

Predicted = torch.Tensor | list[int]
"""Logits `[R, V]` of rows, or where the first largest of each is, when that is all they are for."""


class Chooser:
    """What `verify` asks: each row's token given all emitted before, and its emission.

    Args:
        sequence: Takes the tokens.
        predicted: Of the sequence's rows of this step; logits unless it `takes_largest`.
    """

    def __init__(self, sequence: Sequence, predicted: Predicted) -> None:
        assert sequence.output is not None
        self._sequence = sequence
        self._output = sequence.output
        self._row = 0
        self._largest: list[int] | None = None
        self._logits: torch.Tensor | None = None
        if isinstance(predicted, list):
            self._largest = predicted
            return
        self._logits = predicted
        if self._output.cursor is None and sequence.sampling.is_plain_greedy:
            self._largest = predicted.argmax(dim=-1).tolist()

    def choose(self, row: int) -> int:
        """Return the token after a row."""
        self._row = row
        if self._largest is not None:
            return self._largest[row]
        output = self._output
        assert self._logits is not None
        return sampler.choose(
            self._logits[row],
            self._sequence.sampling,
            seed=self._sequence.seed,
            position=len(self._sequence.tokens),
            prompt_ids=self._sequence.prompt_ids,
            output=output.token_ids,
            mask=output.cursor.mask() if output.cursor is not None else None,
        )

    def emit(self, token_id: int) -> bool:
        """Take the token chosen last into the output; return whether more may follow."""
        num_top = self._output.num_top
        logprob = None if num_top is None else self._logprob(token_id, num_top)
        return self._sequence.append(token_id, logprob)

    def _logprob(self, token_id: int, num_top: int) -> TokenLogprob:
        output = self._output
        assert self._logits is not None
        logprobs = sampler.log_probabilities(
            self._logits[self._row],
            self._sequence.sampling,
            prompt_ids=self._sequence.prompt_ids,
            output=output.token_ids,
            mask=output.cursor.mask() if output.cursor is not None else None,
        )
        top = sampler.likeliest(logprobs, num_top)
        return TokenLogprob(
            self._candidate(token_id, float(logprobs[token_id])),
            tuple(self._candidate(other, logprob) for other, logprob in top),
        )

    def _candidate(self, token_id: int, logprob: float) -> Candidate:
        return Candidate(token_id, self._output.token_bytes[token_id], logprob)
