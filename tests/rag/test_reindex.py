"""Another embedding model: refused until all is embedded again, which nothing can harm."""

from dataclasses import dataclass, field

import pytest

from ragflash.errors import Conflict, DataFolderLocked, IndexMismatch, VectorStoreUnavailable
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.placement import Placement, ServerAddress
from ragflash.rag.records import DocumentState, JobState, Scope, SearchMode
from ragflash.rag.reindex import ReindexResult, reindex
from tests.rag.conftest import HashEmbedder, TextParser
from tests.rag.qdrant_stub import Fault

MINE = Scope(frozenset({"mine"}))
TWO = Scope(frozenset({"mine", "theirs"}))
LONG = "\n\n".join(f"Part {n} tells of subject{n}. " + "More words. " * 70 for n in range(6))
TEXTS = {"a.txt": "The warranty lasts two years.", "b.txt": LONG, "c.txt": "One\funreadable"}
FORMER, NEW = HashEmbedder(), HashEmbedder(dim=32, name="new")


class Interrupted(Exception):
    """Ends a run where a Ctrl-C or a kill might."""


@dataclass
class Shop:
    """One data folder, opened, closed and embedded again."""

    config: LibraryConfig
    parser: TextParser = field(default_factory=TextParser)
    opened: list[Library] = field(default_factory=list)

    def open(self, embedder: HashEmbedder) -> Library:
        self.close()
        self.opened.append(Library.open(self.config, embedder, parser=self.parser))
        return self.opened[-1]

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()

    def fill(self) -> dict[str, str]:
        library = self.open(FORMER)
        ids = {}
        for name, text in TEXTS.items():
            result = library.add(TWO, "theirs" if name == "c.txt" else "mine", name, text.encode())
            assert library.wait(TWO, result.job.id, 60).state is JobState.DONE
            ids[name] = result.document.id
        self.close()
        return ids

    def reindex(self, embedder: HashEmbedder = NEW, stop_at: int | None = None) -> ReindexResult:
        embedder.encoded = []
        reports: list[tuple[int, int]] = []

        def report(done: int, total: int) -> None:
            reports.append((done, total))
            if done == stop_at:
                raise Interrupted

        result = reindex(self.config.data_dir, self.config.server, embedder, report)
        assert reports == sorted(reports)
        assert not result.former or reports[-1] == (result.passages, result.passages)
        return result

    def kept_stores(self) -> set[str]:
        return {folder.name for folder in (self.config.data_dir / "index").iterdir()}


@pytest.fixture(params=["embedded", "server"])
def shop(request, tmp_path, monkeypatch):
    monkeypatch.setattr("ragflash.rag.points.EMBED_BATCH", 2)
    server = None
    if request.param == "server":
        monkeypatch.setattr("ragflash.rag.server_calls.time.sleep", lambda _: None)
        server = ServerAddress(request.getfixturevalue("qdrant").url)
    made = Shop(LibraryConfig(tmp_path / "data", server=server))
    yield made
    made.close()


def test_after_another_model_was_configured_all_is_embedded_again(shop):
    ids = shop.fill()
    with pytest.raises(IndexMismatch, match="run `ragflash reindex`"):
        shop.open(NEW)
    done = shop.reindex()
    assert done.former == (FORMER.fingerprint,)
    assert (done.documents, done.embedded) == (3, done.passages)
    assert len(NEW.encoded) == done.passages

    library = shop.open(NEW)
    assert shop.parser.parsed == list(TEXTS)
    found = library.search(MINE, "subject4", limit=3)
    assert found[0].chunk.document_id == ids["b.txt"]
    (nearest,) = library.search(MINE, "two years warranty", limit=1, mode=SearchMode.DENSE)
    assert nearest.chunk.document_id == ids["a.txt"]
    assert library.get(TWO, ids["c.txt"]).state is DocumentState.PARTIAL
    shop.close()
    assert Library.reconcile(shop.config, NEW, dry_run=True).is_clean
    with pytest.raises(IndexMismatch, match=r"dim=32.*dim=64.*is configured"):
        shop.open(FORMER)
    assert shop.reindex() == ReindexResult((), 3, done.passages, 0)
    assert NEW.encoded == []


def test_an_interrupted_run_harms_nothing_and_is_continued(shop):
    ids = shop.fill()
    with pytest.raises(Interrupted):
        shop.reindex(stop_at=4)
    library = shop.open(FORMER)
    assert library.search(MINE, "subject4")[0].chunk.document_id == ids["b.txt"]
    shop.close()
    with pytest.raises(IndexMismatch):
        shop.open(NEW)
    with pytest.raises(Interrupted):  # opening the library removed what was embedded for the other
        shop.reindex(stop_at=4)
    done = shop.reindex()
    assert done.embedded == done.passages - 3
    assert shop.open(NEW).search(MINE, "warranty")[0].chunk.document_id == ids["a.txt"]


def test_documents_on_their_way_are_embedded_with_the_new_model(shop):
    shop.fill()
    library = shop.open(FORMER)
    embedding, queued = (
        library.add(MINE, "mine", f"{n}.txt", f"late text {n}".encode()) for n in range(2)
    )
    for added in (embedding, queued):
        library.wait(MINE, added.job.id, 60)
    deleted = library.add(MINE, "mine", "x.txt", b"deleted text").document.id
    shop.close()
    library = shop.open(FORMER)
    for added, state in ((embedding, "embedding"), (queued, "queued")):
        library._worker._stopping.set()
        library._database.execute(
            "UPDATE documents SET state = ? WHERE id = ?", state, added.document.id
        )
        library._database.execute("UPDATE jobs SET state = 'queued' WHERE id = ?", added.job.id)
    library._database.execute("UPDATE documents SET state = 'deleting' WHERE id = ?", deleted)
    shop.close()
    assert shop.reindex().documents == 3
    library = shop.open(NEW)
    for added in (embedding, queued):
        assert library.wait(MINE, added.job.id, 60).state is JobState.DONE
    late = {hit.chunk.document_id for hit in library.search(MINE, "late text", limit=2)}
    assert late == {embedding.document.id, queued.document.id}
    assert deleted not in {document.id for document in library.list(MINE).items}
    shop.close()
    assert Library.reconcile(shop.config, NEW, dry_run=True).is_clean


def test_the_vectors_of_the_former_model_are_removed(shop, request):
    shop.fill()
    placement = Placement.load(shop.config.data_dir)
    shop.reindex()
    if shop.config.server is None:
        own = placement.folder(shop.config.data_dir, NEW.fingerprint)
        assert shop.kept_stores() == {own.name}
    else:
        collections = request.getfixturevalue("qdrant").collections
        assert set(collections) == {placement.collection(NEW.fingerprint)}


def test_a_library_in_use_is_left_alone(shop):
    shop.fill()
    shop.open(FORMER)
    with pytest.raises(DataFolderLocked):
        shop.reindex()


def test_a_server_that_goes_away_meanwhile_is_told_and_the_next_run_goes_on(
    tmp_path, qdrant, monkeypatch
):
    monkeypatch.setattr("ragflash.rag.server_calls.time.sleep", lambda _: None)
    shop = Shop(LibraryConfig(tmp_path / "data", server=ServerAddress(qdrant.url)))
    shop.fill()
    NEW.before_batch = lambda: qdrant.order(Fault.UNAVAILABLE, times=1000)
    try:
        with pytest.raises(VectorStoreUnavailable, match="503"):
            shop.reindex()
    finally:
        NEW.before_batch = lambda: None
        qdrant.faults.clear()
    assert shop.reindex().former == (FORMER.fingerprint,)
    assert shop.open(NEW).search(MINE, "warranty")
    shop.close()


def test_the_wrong_kind_of_store_is_refused(tmp_path, qdrant):
    shop = Shop(LibraryConfig(tmp_path / "data"))
    shop.fill()
    shop.config = LibraryConfig(tmp_path / "data", server=ServerAddress(qdrant.url))
    with pytest.raises(Conflict, match="move-store"):
        shop.reindex()
    assert qdrant.collections == {}
