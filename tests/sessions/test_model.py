"""Whatever is done in whatever order: the folder holds what a simple model holds."""

import itertools
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragflash.sessions import RefusalReason, Refused
from ragflash.sessions.records import prefix_keys
from tests.sessions.samples import (
    IDENTITY,
    SHARED_MEMORY,
    files_of,
    flip,
    is_stored,
    open_folder,
    store,
)

Prompt = tuple[tuple[int, ...], ...]
CHAINS = list(itertools.product([(1,), (2,)], [(10, 1), (10, 2)], [(20,), (21,)]))
PROMPTS: list[Prompt] = sorted({chain[:length] for chain in CHAINS for length in (1, 2, 3)})
PROMPT = st.sampled_from(PROMPTS)


def id_of(prompt: Prompt) -> str:
    return prefix_keys(prompt, IDENTITY, "mine")[-1].key.hex()


class SessionsMachine(RuleBasedStateMachine):
    """The model is a dictionary: prompts with whether they are pinned, and their documents."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = Path(tempfile.mkdtemp(dir=SHARED_MEMORY, prefix="ragflash-"))
        self._path = self._memory / "sessions"
        self.folder = open_folder(self._path, num_readers=1)
        self.pinned: dict[Prompt, bool] = {}
        self.sources: dict[Prompt, set[str]] = {}
        self.deleted: set[str] = set()

    def teardown(self) -> None:
        self.folder.close()
        shutil.rmtree(self._memory)

    def forget(self, gone: Prompt) -> None:
        for prompt in list(self.pinned):
            if prompt[: len(gone)] == gone:
                del self.pinned[prompt], self.sources[prompt]

    @rule(prompt=PROMPT, source=st.sampled_from(["a", "b", "c"]))
    def store(self, prompt, source):
        refused = store(self.folder, *prompt, source_ids=[source])
        sources = {source} | self.sources.get(prompt[:-1], set())
        if prompt[:-1] and prompt[:-1] not in self.pinned:
            assert refused == Refused(RefusalReason.PARENT_NOT_STORED)
        elif sources & self.deleted:
            assert refused == Refused(RefusalReason.SOURCE_DELETED)
        elif prompt in self.pinned:
            assert refused == Refused(RefusalReason.ALREADY_STORED)
        else:
            assert refused is None
            self.pinned[prompt] = False
            self.sources[prompt] = sources

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data, pinned):
        prompt = data.draw(st.sampled_from(sorted(self.pinned)))
        session_id = id_of(prompt)
        (self.folder.pin if pinned else self.folder.unpin)(session_id)
        self.pinned[prompt] = pinned

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def delete(self, data):
        prompt = data.draw(st.sampled_from(sorted(self.pinned)))
        before = len(self.pinned)
        num_deleted = self.folder.delete(id_of(prompt))
        self.forget(prompt)
        assert num_deleted == before - len(self.pinned)

    @rule(source=st.sampled_from(["b", "c"]))
    def delete_source(self, source):
        self.folder.delete_source(source)
        self.deleted.add(source)
        for prompt in [p for p, sources in self.sources.items() if source in sources]:
            self.forget(prompt)

    @precondition(lambda self: any(len(prompt) == 3 for prompt in self.pinned))
    @rule(data=st.data())
    def damage_a_turn(self, data):
        turns = sorted(prompt for prompt in self.pinned if len(prompt) == 3)
        prompt = data.draw(st.sampled_from(turns))
        (file,) = (f for f in files_of(self._path) if f.stem == id_of(prompt))
        flip(file, data.draw(st.integers(0, file.stat().st_size - 1)), 4)
        assert self.folder.verify() == (file.stem,)
        self.forget(prompt)

    @rule(lose_index=st.booleans())
    def restart(self, lose_index):
        self.folder.close()
        if lose_index:
            for name in self._path.glob("index.sqlite*"):
                name.unlink()
        self.folder = open_folder(self._path, num_readers=1)
        self.deleted.clear()

    @rule()
    def gc(self):
        self.folder.gc()

    @invariant()
    def it_holds_what_the_model_holds(self):
        infos = {info.id: info for info in self.folder.list()}
        assert len(infos) == len(self.pinned) == len(files_of(self._path))
        for prompt in PROMPTS:
            assert is_stored(self.folder, *prompt) is (prompt in self.pinned)
            if prompt in self.pinned:
                info = infos[id_of(prompt)]
                assert info.pinned is self.pinned[prompt]
                assert set(info.source_ids) == self.sources[prompt]


SessionsMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestSessions = SessionsMachine.TestCase
