"""llama.cpp's own lookups beside ours: the same file, prompts and lengths, greedy.

llama-cpp-python has prompt lookup: the last one or two tokens are searched in prompt and output
from the beginning, and as many tokens as it is told are proposed; its documentation names 10, and 2
where there is no card.
"""

import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragflash.bench.draft_tasks import Sizes, copied_share, make_document, messages_of
from ragflash.bench.peer import PACKAGE
from ragflash.bench.record import Series
from ragflash.engine.prompt import compile_prompt
from ragflash.errors import EngineError
from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.reader import GGUFFile
from ragflash.gguf.tokenizer import Tokenizer

TASKS = ("copy", "free")
MODES: Mapping[str, int] = {"lookup10": 10, "lookup2": 2}
"""Names of series, and tokens proposed."""

_OFF = "off"
_BATCH_TOKENS = 512


class LookupPeer:
    """A model in llama.cpp with prompt lookup, or without.

    Args:
        path: A GGUF file.
        threads: For prompts and for decoding.
        context_tokens: Room for keys and values.
        num_tokens: Of a proposal; `None` decodes plainly.
    """

    def __init__(
        self, path: Path, *, threads: int, context_tokens: int, num_tokens: int | None
    ) -> None:
        # No stubs exist for a library that may be absent, so it is not typed here.
        library: Any = importlib.import_module("llama_cpp")
        self.num_proposals = 0
        lookup: Any = None
        if num_tokens is not None:
            speculative: Any = importlib.import_module("llama_cpp.llama_speculative")
            lookup = speculative.LlamaPromptLookupDecoding(num_pred_tokens=num_tokens)

        def propose(input_ids: NDArray[np.intc]) -> NDArray[np.intc]:
            self.num_proposals += 1
            found: NDArray[np.intc] = lookup(input_ids)
            return found

        self._llama: Any = library.Llama(
            model_path=str(path),
            n_ctx=context_tokens,
            n_batch=_BATCH_TOKENS,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=propose if lookup else None,
            logits_all=lookup is not None,  # or it has no room for those of a draft
            verbose=False,
        )

    def answer(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float, float]:
        """Return an answer's tokens, tokens a second behind the first, and tokens a step.

        Raises:
            EngineError: It has one token.
        """
        tokens: list[int] = []
        begun = ended = 0.0
        ends = self._llama.token_eos()
        for token in self._llama.generate(list(prompt), temp=0.0):
            ended = time.perf_counter()
            if not tokens:
                begun, self.num_proposals = ended, 0
            tokens.append(token)
            if len(tokens) == max_tokens or token == ends:
                break
        behind = len(tokens) - 1
        if not behind:
            raise EngineError("llama.cpp ended its answer at once: there is nothing to time")
        return tokens, behind / (ended - begun), behind / (self.num_proposals or behind)

    def close(self) -> None:
        """Give back the memory."""
        self._llama.close()


def measure_peer(
    path: Path, prose: str, sizes: Sizes, task: str, context: int, threads: int
) -> tuple[dict[str, Any], dict[str, Series]]:
    """Answer a task with each of `MODES` and plainly, in changing order; return row and series."""
    with GGUFFile.open(path) as file:
        first = file.path
        tokenizer = Tokenizer.from_gguf(file)
        template = ChatTemplate.from_gguf(file, tokenizer)
    document = make_document(
        prose, context - sizes.question_tokens, sizes.list_rows, tokenizer.encode
    )
    messages = messages_of(task, context, document)
    prompt = compile_prompt(messages, template, tokenizer, {}).token_ids
    most = sizes.output_tokens[task]
    options = {"threads": threads, "context_tokens": len(prompt) + most + max(MODES.values()) + 1}
    widths: dict[str, int | None] = {_OFF: None, **MODES}
    taken: dict[str, list[tuple[float, float]]] = {mode: [] for mode in widths}
    written: dict[str, list[int]] = {}
    peers = {mode: LookupPeer(first, num_tokens=width, **options) for mode, width in widths.items()}
    try:
        for peer in peers.values():
            peer.answer(prompt, 2)  # reads the prompt
        order = [*peers]
        for turn in range(sizes.rounds):
            start = turn % len(order)
            for mode in (*order[start:], *order[:start]):
                written[mode], tok_s, per_step = peers[mode].answer(prompt, most)
                taken[mode].append((tok_s, per_step))
    finally:
        for peer in peers.values():
            peer.close()
    row = {
        "peer": PACKAGE,
        "task": task,
        "context_tokens": context,
        "output_tokens": len(written[_OFF]),
        "copied_share": round(copied_share(written[_OFF], tokenizer.encode(document)), 4),
        "text": tokenizer.decode(written[_OFF]),
        "same_output": {mode: tokens == written[_OFF] for mode, tokens in written.items()},
    }
    return row, _series_of(f"peer_{task}_{context}", taken)


def _series_of(name: str, taken: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Series]:
    series = {}
    for mode, readings in taken.items():
        against = None if mode == _OFF else f"{name}_{_OFF}_tok_s"
        speeds = [tok_s for tok_s, _ in readings]
        series[f"{name}_{mode}_tok_s"] = Series("tokens/s", speeds, against)
        if mode != _OFF:
            per_step = [tokens for _, tokens in readings]
            series[f"{name}_{mode}_tokens_per_step"] = Series("tokens", per_step)
    return series
