"""Lets the model judge evidence by query likelihood: how well a text predicts the question.

Ponte and Croft, "A language modeling approach to information retrieval" (SIGIR 1998); with a
pretrained
model as in Sachan et al., "Improving passage retrieval with zero-shot question generation" (EMNLP
2022).
The likelihood of the question after an empty text is taken off, so that scores of different
questions
can be compared with one threshold.
"""

import asyncio
import uuid
from collections.abc import Sequence

from ragflash.engine.client import EngineClient
from ragflash.engine.request import ScoreRequest
from ragflash.rag.evidence import Evidence, with_gain
from ragflash_prompts import load


async def read_candidates(
    engine: EngineClient, question: str, evidence: Sequence[Evidence], namespace: str
) -> list[Evidence]:
    """Score each candidate's window by the likelihood gain of the question, best first."""
    windows = ["", *(item.window for item in evidence)]
    scores = await asyncio.gather(
        *(_likelihood(engine, question, window, namespace) for window in windows)
    )
    read = [
        with_gain(item, score - scores[0]) for item, score in zip(evidence, scores[1:], strict=True)
    ]
    return sorted(read, key=lambda item: -item.score)


async def _likelihood(engine: EngineClient, question: str, passage: str, namespace: str) -> float:
    """Mean log-probability of the question's tokens after a passage, in nats."""
    request = ScoreRequest(
        id=uuid.uuid4().hex,
        text=load("query_likelihood").render(passage=passage).rstrip(),
        targets=(f" {question}",),
        namespace=namespace,
    )
    scored = await engine.score(request)
    return scored.logprobs[0] / max(1, scored.num_tokens[0])
