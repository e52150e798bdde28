"""Random engines over the segment tree: pages hold what their tables say, and none is ever lost.

Pages are simulated by an array of token ids, written and copied exactly as a pool would be.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragflash.kvcache.allocator import PAGE_TOKENS, PageAllocator, PageForm, PagesExhausted
from ragflash.kvcache.grid import Grid, PageAllocators
from ragflash.kvcache.segments import SegmentHit
from ragflash.kvcache.tree import SegmentTree

NUM_PAGES = 24
SOURCES = ("A", "B", "C")

# Few distinct segments, some of which start alike, so that prompts often share a beginning.
segments = st.builds(
    lambda first, length, last: (*range(first, first + length - 1), last),
    st.sampled_from((0, 100)),
    st.sampled_from((1, 60, 255, 256, 257, 400)),
    st.sampled_from((1, 2)),
)
prompts = st.lists(segments, min_size=1, max_size=4)
namespaces = st.sampled_from(("a", "b"))


class EngineMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocators = self.new_allocators()
        self.tree = SegmentTree(self.allocators)
        self.pages = np.full((NUM_PAGES, PAGE_TOKENS), -1)
        self.packed = np.full((NUM_PAGES, PAGE_TOKENS), -1)
        self.running = []  # (table, opened segment or None, tokens)

    def new_allocators(self):
        return PageAllocators(PageAllocator(NUM_PAGES))

    def copy(self, copies):
        for copy in copies:
            n = copy.num_tokens
            self.pages[copy.dst] = -1
            self.pages[copy.dst, :n] = self.pages[copy.src, :n]

    def write(self, table, tokens):
        table.reserve(len(tokens))
        while len(tokens):
            now, tokens = tokens[: table.room], tokens[table.room :]
            first = table.length - len(table.packed_pages) * PAGE_TOKENS
            for place, token in enumerate(now, start=first):
                self.pages[table.pages[place // PAGE_TOKENS], place % PAGE_TOKENS] = token
            for conversion in table.advance(len(now)):
                self.packed[conversion.packed] = self.pages[conversion.exact]

    def start(self, prompt, namespace):
        """Open what is stored of a prompt; return the table, what was opened, and how much."""
        hit = self.tree.lookup(prompt, identity="m", namespace=namespace)
        if not isinstance(hit, SegmentHit):
            return self.allocators.new_table(), None, 0
        opened = self.tree.open(hit)
        self.copy(opened.copies)
        expected = [token for segment in prompt[: hit.num_segments] for token in segment]
        assert hit.segment.end == opened.table.length == len(expected)
        return opened.table, opened, hit.num_segments

    @rule(prompt=prompts, namespace=namespaces, source=st.sampled_from((None, *SOURCES)))
    def serve(self, prompt, namespace, source):
        try:
            table, opened, done = self.start(prompt, namespace)
        except PagesExhausted:
            return
        tokens = [token for segment in prompt[:done] for token in segment]
        self.running.append((table, opened, tokens))
        try:
            for end in range(done + 1, len(prompt) + 1):
                self.write(table, prompt[end - 1])
                tokens.extend(prompt[end - 1])
                pending = self.tree.begin(
                    prompt[:end],
                    identity="m",
                    namespace=namespace,
                    table=table,
                    state=(tuple(tokens),),
                    source_ids=frozenset({source} if source else ()),
                )
                if pending is not None:
                    self.copy(pending.copies)
                    self.tree.commit(pending)
        except PagesExhausted:
            self.tree.evict(4)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def finish(self, index):
        table, opened, _ = self.running.pop(index % len(self.running))
        table.release()
        if opened is not None:
            self.tree.close(opened)

    @rule(num_pages=st.integers(0, 6), form=st.sampled_from(PageForm))
    def evict(self, num_pages, form):
        if form is PageForm.PACKED and self.allocators.packed is None:
            return
        before = self.allocators.of(form).num_free
        num_freed = self.tree.evict(num_pages, form)
        assert self.allocators.of(form).num_free == before + num_freed

    @rule(prompt=prompts, namespace=namespaces)
    def look(self, prompt, namespace):
        hit = self.tree.lookup(prompt, identity="m", namespace=namespace)
        if isinstance(hit, SegmentHit):
            expected = [token for segment in prompt[: hit.num_segments] for token in segment]
            assert hit.segment.state == (tuple(expected),)
            assert self.read(hit.segment, hit.segment.end) == expected

    @rule(source=st.sampled_from(SOURCES), prompt=prompts)
    def delete(self, source, prompt):
        self.tree.drop_source(source)
        for namespace in ("a", "b"):
            hit = self.tree.lookup(prompt, identity="m", namespace=namespace)
            assert not isinstance(hit, SegmentHit) or source not in hit.segment.source_ids

    def read(self, holder, length):
        exact = self.pages[list(holder.pages)].reshape(-1).tolist()
        packed = self.packed[list(holder.packed_pages)].reshape(-1).tolist()
        return [*exact[:PAGE_TOKENS], *packed, *exact[PAGE_TOKENS:]][:length]

    @invariant()
    def running_sequences_read_their_own_tokens(self):
        for table, _, tokens in self.running:
            assert self.read(table, table.length) == tokens

    def teardown(self):
        while self.running:
            self.finish(0)
        self.tree.evict(NUM_PAGES)
        assert len(self.tree) == 0
        assert self.allocators.num_free == self.allocators.num_pages


class TwoFormsMachine(EngineMachine):
    """The same, where pages are packed as they grow old."""

    def new_allocators(self):
        exact, packed = PageAllocator(NUM_PAGES), PageAllocator(NUM_PAGES, PageForm.PACKED)
        return PageAllocators(exact, packed, Grid(PAGE_TOKENS))


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTwoFormsMachine = TwoFormsMachine.TestCase
TestTwoFormsMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
