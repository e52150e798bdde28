"""Keeps of a written answer only the sentences that its quotes support.

A sentence is supported when every number and every name in it occurs in the quotes or the question,
and most of its other words do. This rejects what a model adds from memory; it does not prove
entailment.
"""

import re
from collections.abc import Sequence

from ragflash.rag.answer_type import holds_words
from ragflash.rag.sparse import query_weights
from ragflash_ingest.normalise import normalise
from ragflash_ingest.sentences import sentences

_MIN_SHARE = 0.7
_NUMBER = re.compile(r"\d[\d.,:/-]*")
_NUMBER_JOINT = re.compile(r"[:/-]")
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)\b[A-Z][\w-]+|\b\w*[_/]\w[\w/]*|\b[A-Z]{2,}\b")


def supported_text(written: str, quotes: Sequence[str], question: str) -> str:
    """Return the leading sentences of `written` that are supported; empty when the first is not."""
    text = " ".join(written.split()).removeprefix("Answer:").strip()
    basis = normalise(" ".join([*quotes, question])).text
    basis_terms = set(query_weights(basis))
    kept = ""
    for start, end in sentences(text):
        if not is_supported(text[start:end], basis, basis_terms):
            break
        kept = text[:end]
    return kept.strip()


def is_supported(sentence: str, basis: str, basis_terms: set[int]) -> bool:
    """Whether a sentence says nothing that the basis does not.

    Args:
        sentence: One sentence of an answer.
        basis: Quotes and question in match form.
        basis_terms: Terms of `basis`.
    """
    if not _numbers(sentence) <= _numbers(basis):
        return False
    folded = basis.casefold()
    if not holds_words(folded, frozenset(map(str.casefold, _NAME.findall(sentence)))):
        return False
    own = set(query_weights(sentence))
    return bool(own) and len(own & basis_terms) >= _MIN_SHARE * len(own)


def _numbers(text: str) -> set[str]:
    """Numbers as written, and the parts of ranges, dates and times."""
    whole = {number.rstrip(".,:/-") for number in _NUMBER.findall(text)}
    return whole | {part for number in whole for part in _NUMBER_JOINT.split(number)}
