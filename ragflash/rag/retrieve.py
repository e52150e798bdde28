"""Search: a dense and a sparse leg over the same passages, fused by rank.

Reciprocal rank fusion after Cormack, Clarke and Buettcher (SIGIR 2009). A leg that finds nothing
adds nothing, and the dense leg has as much say as its model can be trusted with the query, so a
question that one leg is blind to is answered by the other.
"""

from collections import defaultdict
from collections.abc import Sequence

from ragflash.errors import QuestionBlank
from ragflash.rag.corpus import Corpus
from ragflash.rag.embed import Embedder
from ragflash.rag.index import VectorFilter, VectorHit, VectorIndex
from ragflash.rag.records import ChunkRecord, Scope, SearchHit, SearchMode
from ragflash.rag.sparse import (
    Term,
    analyse,
    document_identifiers,
    inverse_frequencies,
    query_identifiers,
    query_weights,
)

LEG_LIMIT = 50
RRF_K = 60
EXACT_WITHIN = 3  # an exact hit stands among the first three, whatever the legs say

_Key = tuple[str, int]


class Retriever:
    """Finds passages; thread-safe, and no row outside the scope leaves it."""

    def __init__(self, corpus: Corpus, index: VectorIndex, embedder: Embedder) -> None:
        self._corpus = corpus
        self._index = index
        self._embedder = embedder

    def search(
        self,
        scope: Scope,
        query: str,
        *,
        document_ids: Sequence[str] | None,
        limit: int,
        mode: SearchMode,
    ) -> list[SearchHit]:
        """Find passages, best first.

        Raises:
            QuestionBlank: The query holds no word.
            NotFound: A document is not in scope.
        """
        if not analyse(query):
            raise QuestionBlank("the query holds no word: send one")
        if document_ids is not None:
            document_ids = [self._corpus.get(scope, id_).id for id_ in document_ids]
        seen = VectorFilter(scope.collection_ids, document_ids, self._corpus.unsearchable(scope))
        leg_limit = max(LEG_LIMIT, limit)
        dense = sparse = []
        if mode is not SearchMode.SPARSE:
            vector = self._embedder.encode_query(query)
            dense = _positive(self._index.query_dense(vector, seen, leg_limit))
        if mode is not SearchMode.DENSE:
            weights = self._weigh(scope, query)
            sparse = _positive(self._index.query_sparse(weights, seen, leg_limit))
        trust = self._embedder.trust(query) if dense and sparse else 1.0  # alone it has all say
        return self._collect(scope, self._codes(scope, query), dense, sparse, trust, limit)

    def term_weights(self, text: str) -> dict[int, float]:
        """Terms of a text, stop words left out, weighed by how rare they are in the library.

        A term that no document holds weighs the most.
        """
        weights = query_weights(text)
        frequencies = self._corpus.frequencies(weights.keys(), None)
        known = {term: frequencies.get(term, 0) for term in weights}
        inverse = inverse_frequencies(known, self._corpus.total_chunks(None))
        return {term: weight * inverse[term] for term, weight in weights.items()}

    def _weigh(self, scope: Scope, query: str) -> dict[int, float]:
        weights = query_weights(query)
        frequencies = self._corpus.frequencies(weights.keys(), scope)
        inverse = inverse_frequencies(frequencies, self._corpus.total_chunks(scope))
        return {term: weights[term] * value for term, value in inverse.items()}

    def _codes(self, scope: Scope, query: str) -> set[str]:
        """The codes and names of a query that some passage in scope may hold as written."""
        ids = {Term(code).id: code for code in query_identifiers(query)}
        return {ids[id_] for id_ in self._corpus.frequencies(ids.keys(), scope)}

    def _collect(
        self,
        scope: Scope,
        codes: set[str],
        dense: Sequence[VectorHit],
        sparse: Sequence[VectorHit],
        trust: float,
        limit: int,
    ) -> list[SearchHit]:
        scores = fuse([(dense, trust), (sparse, 1.0)])
        dense_scores = {_key(hit): hit.score for hit in dense}
        sparse_scores = {_key(hit): hit.score for hit in sparse}
        # Passages are read as far down as it takes; where codes count, all are looked at.
        ranking = sorted(scores, key=lambda key: (-scores[key], key))
        step = len(ranking) if codes else limit
        rows: dict[_Key, tuple[ChunkRecord, str]] = {}
        for start in range(0, len(ranking), max(step, 1)):
            if len(rows) < limit:
                rows |= self._corpus.find_chunks(scope, ranking[start : start + step])
        hits = []
        for key, (chunk, name) in rows.items():
            hit = SearchHit(
                chunk=chunk,
                document_name=name,
                score=scores[key],
                dense_score=dense_scores.get(key),
                sparse_score=sparse_scores.get(key),
                exact=bool(codes) and not codes.isdisjoint(document_identifiers(chunk.text)),
            )
            hits.append(hit)
        return _raise_exact(sorted(hits, key=_order))[:limit]


def fuse(legs: Sequence[tuple[Sequence[VectorHit], float]]) -> dict[_Key, float]:
    """Reciprocal rank fusion: each leg adds its weight / (60 + rank) to what it found.

    A leg without weight finds nothing.
    """
    scores: defaultdict[_Key, float] = defaultdict(float)
    for leg, weight in legs:
        if not weight:
            continue
        for rank, hit in enumerate(leg, 1):
            scores[_key(hit)] += weight / (RRF_K + rank)
    return dict(scores)


def _order(hit: SearchHit) -> tuple[float, bool, str, int]:
    return (-hit.score, not hit.exact, hit.chunk.document_id, hit.chunk.index)


def _raise_exact(hits: list[SearchHit]) -> list[SearchHit]:
    if any(hit.exact for hit in hits[:EXACT_WITHIN]):
        return hits
    best = next((at for at, hit in enumerate(hits) if hit.exact), None)
    if best is None:
        return hits
    others = hits[:best] + hits[best + 1 :]
    return [*others[: EXACT_WITHIN - 1], hits[best], *others[EXACT_WITHIN - 1 :]]


def _positive(hits: Sequence[VectorHit]) -> list[VectorHit]:
    return [hit for hit in hits if hit.score > 0]


def _key(hit: VectorHit) -> _Key:
    return (hit.document_id, hit.chunk_index)
