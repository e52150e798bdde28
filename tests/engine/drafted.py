"""Toy models with a block of multi-token prediction or a DFlash drafter, and questions to them."""

import asyncio
from contextlib import closing
from pathlib import Path

import torch

from ragflash.engine.build import start_engine
from ragflash.engine.constraint import QuoteFrom
from ragflash.engine.request import (
    ChatMessage,
    Finished,
    GenerateRequest,
    SamplingParams,
    SegmentKind,
    Span,
    TextSegment,
)
from tests.models.dflash.drafters import make_toy, write_folder
from tests.models.families import FAMILIES, HIDDEN_SIZE
from tests.models.mtp_reference import MtpReference
from tests.models.toy_files import TOKENS, write_gguf

DOCUMENT = "Seals are replaced every year; the pressure is 16 bar. " * 5
SAMPLED = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.1)
REQUESTS = (
    {},
    {"sampling": SAMPLED},
    {"constraint": QuoteFrom(("manual",))},
    {"logprobs": True, "top_logprobs": 2, "stop": ("e",)},
)


def start(path: Path, **options):
    sizes = {"kv_bytes": 64 << 20, "prefill_chunk_tokens": 96, "threads": 1, "dtype": "float32"}
    return closing(start_engine(path, **{"device": "cpu", **sizes, **options}))


def request(question: str = "Copy it.", *, document: str = DOCUMENT, **options) -> GenerateRequest:
    segments = (
        TextSegment(SegmentKind.DOCUMENT, document, (Span("manual", 0, 0, len(document)),)),
        TextSegment(SegmentKind.QUESTION, question),
    )
    options = {"max_tokens": 20, **options}
    return GenerateRequest("r", (ChatMessage("user", segments),), **options)


def ask(engine, question: str = "Copy it.", **options) -> Finished:
    return asyncio.run(engine.complete(request(question, **options)))


def told(found: Finished) -> tuple[object, ...]:
    """All that drafts must not change."""
    return found.token_ids, found.text, found.reason, found.quotes


def counted(found: Finished) -> tuple[object, ...]:
    """What was drafted, what of it held, and how often nothing was and why."""
    return found.timings.drafts, found.timings.idle_steps


def write_with_mtp(path: Path, of: str = "qwen35", *, is_right: bool = False) -> Path:
    """Write a toy whose block is random, or predicts exactly what the model does.

    For the latter, layers add nothing to the stream: a token alone decides what follows it.
    """
    family = FAMILIES[of]
    reference = MtpReference(len(TOKENS), family)
    tensors = reference.tensors()
    if is_right:
        for name, values in tensors.items():
            if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
                values.zero_()
        tensors["blk.4.nextn.enorm.weight"] = torch.ones(HIDDEN_SIZE)
        tensors["blk.4.nextn.shared_head_norm.weight"] = tensors["output_norm.weight"].clone()
        embedding_alone = torch.cat((torch.eye(HIDDEN_SIZE), torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)))
        tensors["blk.4.nextn.eh_proj.weight"] = embedding_alone.t().contiguous()
    metadata = {**family.metadata, "block_count": 5, "nextn_predict_layers": 1}
    return write_gguf(path, family.architecture, metadata, tensors, tokenizer=True)


def write_target(path: Path, name: str, *, is_constant: bool = False) -> Path:
    """Write a toy of a family; a constant one answers with the same token always."""
    family = FAMILIES[name]
    tensors = family.tensors(family.build(seed=1, vocab_size=len(TOKENS)))
    if is_constant:
        tensors["token_embd.weight"][:, 0] = 9.0
        tensors["output_norm.weight"][0] = 1.0
        tensors["output.weight"][TOKENS.index("a"), 0] = 99.0
    return write_gguf(path, family.architecture, family.metadata, tensors, tokenizer=True)


def write_drafter(folder: Path, *, is_constant: bool = False) -> Path:
    """Write a random drafter of any target of three layers and more.

    The layers of a constant one add nothing to the stream.
    """
    config = {"mask_token_id": len(TOKENS) - 1, "target_layer_ids": [0, 2]}
    toy = make_toy(vocab_size=len(TOKENS), hidden_size=HIDDEN_SIZE, dflash_config=config)
    if is_constant:
        for name, values in toy.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                values.data.zero_()
    said = {name: value for name, value in toy.config.items() if name != "num_target_layers"}
    return write_folder(toy, folder, said)
