"""A model's own block of multi-token prediction in the loop of propose, verify and observe."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ragflash.models.contract import SequenceRows, Tapped
from ragflash.models.mtp import MtpHead
from ragflash.models.mtp_runner import HostMtp
from ragflash.models.qwen35 import Qwen35
from ragflash.speculative.drafter import Draft
from ragflash.speculative.mtp import MtpDrafter
from ragflash.speculative.verify import verify
from tests.models.families import HIDDEN_SIZE
from tests.models.forwards import PAGES, batch_of, poisoned_pages
from tests.models.mtp_reference import MtpReference, write_and_load

VOCAB = 5
TEXT = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
DEPTH = 3


@pytest.fixture(scope="module")
def reference() -> MtpReference:
    return MtpReference(VOCAB)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory) -> Qwen35:
    return write_and_load(reference.tensors(), tmp_path_factory.mktemp("mtp") / "toy.gguf")


class Loop:
    """What the engine does for one sequence, pages and all."""

    def __init__(self, model: Qwen35, head: MtpHead | None = None) -> None:
        assert model.mtp is not None
        self.model, self.pages = model, poisoned_pages(model)
        self.block = HostMtp(model, head or model.mtp, self.pages)
        self.drafter = self.new_drafter()
        self.committed = 0
        model.reset(0)

    def new_drafter(self) -> MtpDrafter:
        return MtpDrafter(self.block, self.rows_of, DEPTH)

    @staticmethod
    def rows_of(position: int, num_rows: int) -> SequenceRows:
        return SequenceRows(0, num_rows, position, PAGES, ())

    def forward(self, token_ids: Sequence[int], num_draft: int = 0) -> Tapped:
        batch = batch_of(token_ids, self.committed, num_draft=num_draft)
        return self.model.forward_tapped(batch, self.pages, ())

    def commit(self, token_ids: Sequence[int], rows: torch.Tensor) -> None:
        self.model.commit(0, range(len(token_ids)))
        self.drafter.absorb(self.committed, token_ids, rows[: len(token_ids)])
        self.committed += len(token_ids)

    def read(self, token_ids: Sequence[int], chunks: Sequence[int]) -> None:
        """Compute and commit a text in chunks."""
        for size in chunks:
            part = token_ids[self.committed : self.committed + size]
            self.commit(part, self.forward(part).stream)


def proposed(reference: MtpReference, token_ids: Sequence[int], *, normed: bool) -> list[int]:
    """What the reference drafts, all rows anew for every token; zeros stand before the first."""
    rows = reference.trunk_hidden(token_ids[:-1]) if normed else raw_rows(reference, token_ids[:-1])
    rows, tokens = torch.cat((torch.zeros(1, HIDDEN_SIZE), rows)), list(token_ids)
    for _ in range(DEPTH):
        last = reference.further(rows, tokens, normed=normed)[-1:]
        rows = torch.cat((rows, last))
        tokens.append(int(reference.logits(last, normed=normed).argmax()))
    return tokens[len(token_ids) :]


@torch.inference_mode()
def raw_rows(reference: MtpReference, token_ids: Sequence[int]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    hook = reference.trunk.model.norm.register_forward_pre_hook(
        lambda _, inputs: found.append(inputs[0])
    )
    reference.trunk.model(torch.tensor([token_ids]))
    hook.remove()
    return found[0][0]


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "raw"])
@pytest.mark.parametrize("chunks", [(39,), (20, 1, 18), (1,) * 39])
def test_proposes_what_the_reference_does(reference, model, chunks, normed):
    loop = Loop(model, replace(model.mtp, reads_normed=normed))
    loop.read(TEXT, chunks)
    found = loop.drafter.propose(TEXT, 8)
    assert found == Draft(tuple(proposed(reference, TEXT, normed=normed)), "mtp")


def test_rows_before_and_after_the_norm_are_not_the_same(reference):
    texts = [TEXT[:end] for end in range(20, 40)]
    drafts = [
        [proposed(reference, text, normed=normed) for text in texts] for normed in (True, False)
    ]
    assert drafts[0] != drafts[1]


def test_an_answer_with_drafts_is_the_answer_without(reference, model):
    loop, tokens, accepted = Loop(model), TEXT[:12], []
    loop.read(tokens, (11,))

    def emit(token: int) -> bool:
        tokens.append(token)
        return True

    while len(tokens) < 40:
        draft = loop.drafter.propose(tokens, DEPTH)
        assert list(draft.token_ids) == proposed(reference, tokens, normed=True)
        rows = (tokens[-1], *draft.token_ids)
        computed = loop.forward(rows, num_draft=DEPTH)
        held = verify(draft, computed.logits.argmax(dim=-1).tolist().__getitem__, emit)
        loop.commit(rows[: 1 + len(held)], computed.stream)
        accepted.append(len(held))
    plain = Loop(model)
    plain.read(tokens, (len(tokens) - 1,))
    likeliest = reference.logits(reference.trunk_hidden(tokens)).argmax(dim=-1).tolist()
    assert tokens[12:] == likeliest[11:-1]
    assert plain.drafter.propose(tokens, DEPTH) == loop.drafter.propose(tokens, DEPTH)
    assert max(accepted) > 0
    assert min(accepted) < DEPTH


def test_waits_for_tokens_that_are_not_computed(model):
    loop = Loop(model)
    loop.read(TEXT, (30,))
    assert loop.drafter.propose(TEXT, 3) == Draft((), "mtp", reason="no_context")
    assert len(loop.drafter.propose(TEXT[:31], 2)) == 2


def test_a_stored_session_proposes_what_it_would_have(model):
    """The block's keys and values are in the pages, which a session keeps, the last row is not."""
    loop = Loop(model)
    loop.read(TEXT, (30,))
    state = loop.drafter.export_state()
    restored = loop.new_drafter()
    restored.load_state(state)
    expected = loop.drafter.propose(TEXT[:31], DEPTH)
    assert restored.propose(TEXT[:31], DEPTH) == expected
    assert restored.export_state() == state


def test_pages_before_a_chunk_are_not_written(model):
    """Sequences may share them, whatever follows."""
    loop = Loop(model)
    loop.read(TEXT, (20,))
    layer = len(model.kv_layout.layers) - 1
    before = loop.pages.exact.keys(layer).clone()
    loop.read(TEXT, (10,))
    loop.drafter.propose(TEXT[:31], DEPTH)
    after = loop.pages.exact.keys(layer)
    changed = ~torch.isclose(before, after, equal_nan=True, rtol=0, atol=0)
    written = changed.any(dim=3).any(dim=1).nonzero().tolist()  # of [pages, heads, tokens, D]
    assert written == [[3, at] for at in range(20, 33)]


def test_waits_for_ever_behind_pages_that_came_without_a_state(model):
    """Nobody knows then whether they have keys and values of the block; a new beginning does."""
    loop = Loop(model)
    loop.read(TEXT, (30,))
    other = loop.new_drafter()
    other.absorb(29, TEXT[29:30], torch.ones(1, HIDDEN_SIZE))
    assert other.position is None
    assert other.propose(TEXT[:31], DEPTH) == Draft((), "mtp", reason="no_context")
    with pytest.raises(ValueError, match="not seen"):
        other.export_state()
    other.absorb(0, TEXT[:1], torch.ones(1, HIDDEN_SIZE))
    assert len(other.propose(TEXT[:2], DEPTH)) == DEPTH


@pytest.mark.parametrize("damage", [b"", b"x" * 408])
def test_refuses_the_state_of_another(model, damage):
    with pytest.raises(ValueError, match="not of this block"):
        Loop(model).drafter.load_state(damage)
