"""What storing keys and values in fewer bits does to a model, against f16 in the same run.

A text is fed to the model: records with a random code each, prose, then the same records again in
another order, then prose that it has not seen. A code counts as copied when every token of it is
the likeliest one the second time. The last prose gives distributions, of which the divergence
from those of f16 is summed up.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ragflash.engine.card import CardOptions, place_on_card
from ragflash.engine.device import DeviceChoice, choose_device
from ragflash.engine.host import HostOptions, place_on_host
from ragflash.engine.placed import Placed
from ragflash.engine.reading import Reading
from ragflash.errors import SettingInvalid
from ragflash.gguf.reader import GGUFFile, content_hash
from ragflash.gguf.tokenizer import Tokenizer
from ragflash.kvcache.formats import KV_FORMATS, KVFormatName
from ragflash.kvcache.planner import GRID_TOKENS, PREFILL_ROWS
from ragflash.models.shapes import model_shape

Progress = Callable[[str, int, int], None]

MOST_COPIES_LOST = 0.02  # of all codes
MOST_MEAN_KL = 0.05  # nats
SEEN_AGAIN_ROWS = 16
_TAIL = 0.99
_CPU_ROWS = 256
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
_SPARE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """What a model is fed.

    Attributes:
        tokens: All of it.
        codes: Where each code is that was there before, `[start, end)`.
        seen_again: Where the records begin for the second time; logits are wanted from there on.
        prose: Where the last prose begins.
    """

    tokens: tuple[int, ...]
    codes: tuple[tuple[int, int], ...]
    seen_again: int
    prose: int


@dataclass(frozen=True, slots=True)
class Quality:
    """One format at one length.

    Attributes:
        context_tokens: Of each text.
        mean_kl: Nats, over the positions of the last prose.
        tail_kl: 99 % of the positions are below it.
        copied: Codes that were copied, as a share.
        copied_exact: The same with f16.
        num_codes: All of them.
        num_positions: Of the last prose.
    """

    kv_format: KVFormatName
    context_tokens: int
    mean_kl: float
    tail_kl: float
    copied: float
    copied_exact: float
    num_codes: int
    num_positions: int

    @property
    def passes(self) -> bool:
        """Whether the format loses little enough."""
        return self.copied >= self.copied_exact - MOST_COPIES_LOST and self.mean_kl <= MOST_MEAN_KL


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        contexts: Tokens of a text, for each length.
        codes: That are to be copied at each length.
        positions: Of prose at the end of a text.
        grid_tokens: On a CPU, of the grid; the newest two blocks stay exact.
    """

    contexts: tuple[int, ...] = (7500, 30_000)
    codes: int = 200
    positions: int = 256
    grid_tokens: int = GRID_TOKENS


def check(
    path: Path,
    prose: str,
    *,
    formats: Sequence[KVFormatName] = (),
    device: DeviceChoice = "auto",
    vram_bytes: int | None = None,
    sizes: Sizes | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Measure formats on a model file.

    Args:
        path: A model, as `GGUFFile.open` takes it.
        prose: Text of a few thousand words.
        formats: All but f16 if none is named.
        device: Where.
        vram_bytes: Of the card.
        sizes: How much.
        progress: Called with what is done, how far it is, and out of how much.

    Returns:
        `best`, the smallest format that passes at every length, and `rows`, as `Quality`.

    Raises:
        SettingInvalid: No length fits the model.
        DeviceError: The card cannot be used.
    """
    sizes, where = sizes or Sizes(), choose_device(device)
    names: list[KVFormatName] = [name for name in formats or KV_FORMATS if name != "f16"]
    with GGUFFile.open(path) as file:
        probes = _probes_of(file, prose, sizes)
        order: list[KVFormatName] = ["f16", *names]
        exact: dict[int, list[_Outcome]] = {}
        rows: list[Quality] = []
        for number, name in enumerate(order):
            progress(f"reading with {name}", number, len(order))
            placed = _place(file, where, name, max(probes), vram_bytes, sizes)
            for length, some in probes.items():
                found = [_read(placed, probe) for probe in some]
                exact.setdefault(length, found)  # f16 comes first
                if name != "f16":
                    rows.append(_compare(name, length, some, exact[length], found))
            del placed  # before the next one is loaded
        progress("done", len(order), len(order))
        return {
            "model": file.path.name,
            "sha256": content_hash(path, None),
            "device": where.type,
            "sizes": asdict(sizes),
            "best": best_format(rows),
            "rows": [{**asdict(row), "passes": row.passes} for row in rows],
        }


def _probes_of(file: GGUFFile, prose: str, sizes: Sizes) -> dict[int, list[Probe]]:
    """Return texts of every length that the model has."""
    longest = model_shape(file).context_tokens
    contexts = [length for length in sizes.contexts if length <= longest]
    if not contexts:
        raise SettingInvalid(
            f"{file.path.name} has {longest} tokens of context, {min(sizes.contexts)} are needed "
            "at least"
        )
    encode = Tokenizer.from_gguf(file).encode
    return {length: [*make_probes(encode, prose, length, sizes)] for length in contexts}


def best_format(rows: Sequence[Quality]) -> KVFormatName:
    """Return the smallest format that passes at every length, f16 if none does."""
    failed = {row.kv_format for row in rows if not row.passes}
    passing = {row.kv_format for row in rows} - failed
    return min(passing, key=lambda name: KV_FORMATS[name].stored_bytes(256), default="f16")


def make_probes(
    encode: Callable[[str], Sequence[int]], prose: str, num_tokens: int, sizes: Sizes
) -> Iterator[Probe]:
    """Yield texts of that many tokens with all codes between them."""
    source = random.Random(num_tokens)
    words = [*encode(prose)]
    space = num_tokens - sizes.positions - _SPARE_TOKENS
    records = [_record(encode, source) for _ in range(sizes.codes)]
    longest = max(len(head) + len(code) for head, code in records)
    most = max(1, space // (2 * longest))
    for start in range(0, len(records), most):
        some = records[start : start + most]
        again = source.sample(some, len(some))
        told = [token for head, code in some for token in (*head, *code)]
        last = words[: sizes.positions]
        rest = words[sizes.positions :] or words
        between = num_tokens - 2 * len(told) - len(last)
        tokens = told + [rest[index % len(rest)] for index in range(between)]
        seen_again, codes = len(tokens), []
        for head, code in again:
            tokens += head
            codes.append((len(tokens), len(tokens) + len(code)))
            tokens += code
        yield Probe(tuple(tokens + last), tuple(codes), seen_again, len(tokens))


def _record(
    encode: Callable[[str], Sequence[int]], source: random.Random
) -> tuple[Sequence[int], Sequence[int]]:
    name, first, second = ("".join(source.choices(_LETTERS, k=count)) for count in (5, 2, 2))
    code = f"{first}{source.randrange(100, 1000)}-{second}{source.randrange(10, 100)}"
    return encode(f"\nThe code of {name.capitalize()} is"), encode(f" {code}.")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a model said to a probe: which codes it copied, and `[positions, V]` in nats."""

    copied: tuple[bool, ...]
    logprobs: torch.Tensor


def _read(placed: Placed, probe: Probe) -> _Outcome:
    on_card = placed.device != "cpu"
    reading = Reading(placed, len(probe.tokens))
    likeliest: list[int] = []
    logprobs: list[torch.Tensor] = []
    start, wanted_from = 0, probe.seen_again - 1  # a row says what follows it
    while start < len(probe.tokens):
        wants = start >= wanted_from
        most = (SEEN_AGAIN_ROWS if wants else PREFILL_ROWS) if on_card else _CPU_ROWS
        end = min(start + min(most, reading.room), len(probe.tokens) if wants else wanted_from)
        part = probe.tokens[start:end]
        logits = reading.feed(part, num_draft=len(part) - 1 if wants else 0, wants_logits=wants)
        if wants:
            likeliest += logits.argmax(-1).tolist()
            rows = logits[max(0, probe.prose - start) :]
            logprobs.append(torch.log_softmax(rows.float(), dim=-1).cpu())
        start = end
    reading.close()
    first = probe.seen_again
    copied = tuple(
        likeliest[begin - first : end - first] == list(probe.tokens[begin:end])
        for begin, end in probe.codes
    )
    return _Outcome(copied, torch.cat(logprobs))


def _compare(
    name: KVFormatName,
    num_tokens: int,
    probes: Sequence[Probe],
    exact: Sequence[_Outcome],
    found: Sequence[_Outcome],
) -> Quality:
    divergences = torch.cat(
        [_divergences(p.logprobs, q.logprobs) for p, q in zip(exact, found, strict=True)]
    )
    num_codes = sum(len(probe.codes) for probe in probes)
    return Quality(
        kv_format=name,
        context_tokens=num_tokens,
        mean_kl=divergences.mean().item(),
        tail_kl=divergences.quantile(_TAIL).item(),
        copied=sum(sum(one.copied) for one in found) / num_codes,
        copied_exact=sum(sum(one.copied) for one in exact) / num_codes,
        num_codes=num_codes,
        num_positions=len(divergences),
    )


def _divergences(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return Kullback and Leibler's divergence of each row of q from p, both `[N, V]` in nats."""
    rows = zip(p, q, strict=True)  # one by one: float64 of all would be gigabytes
    return torch.stack([(one.double().exp() * (one.double() - other)).sum() for one, other in rows])


def _place(
    file: GGUFFile,
    where: torch.device,
    kv_format: KVFormatName,
    num_tokens: int,
    vram_bytes: int | None,
    sizes: Sizes,
) -> Placed:
    if where.type == "cuda":
        card = CardOptions(vram_bytes, num_tokens, kv_format, 1, SEEN_AGAIN_ROWS)
        return place_on_card(file, where, card)
    form = "auto" if kv_format == "f16" else kv_format  # a CPU keeps exact ones as it computes them
    host = HostOptions("auto", "dense", form, sizes.grid_tokens, num_tokens, 1 << 30, 1)
    return place_on_host(file, host)
