"""Whatever a model would like to say: with a whole engine, quotes are chosen sentences."""

import pytest

from ragflash.rag.records import AskMode
from tests.engine.harness import toy_engine
from tests.engine.toys import ToyModel, TurnTemplate, byte_tokenizer, random_logits
from tests.rag.asking import MODES, answered, citations_are_in_the_text

SENTENCES = [
    f"The warranty of pump {name} lasts {n} months from the day of delivery."
    for n, name in enumerate(("alpha", "beta", "gamma"), 3)
]
TEXT = "Pumps are good.\n\n" + "\n\n".join(SENTENCES) + "\n\nNobody has ever seen the sea."
# Tokens that reach over the edges of sentences.
WORDS = (" The", "\n\nThe", " warranty", "months", ".\n", ".\n\n", ".\n\nThe", "y.")


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_tokenizer(*WORDS)
    unwritten = [*range(32), *range(127, 256)]
    logits = random_logits(tokenizer.vocab_size, looks_back=8, never=unwritten)
    model = ToyModel(logits, vocab_size=tokenizer.vocab_size)
    with toy_engine(model, tokenizer, template=TurnTemplate()) as running:
        yield running


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asked", ["warranty of the pump", "months from delivery of the pump"])
def test_the_quote_of_an_engine_is_made_of_chosen_sentences(shelf, engine, mode, asked):
    shelf.add(TEXT)
    answer = answered(shelf, engine.client, asked, mode=mode, max_tokens=8)
    assert answer.answered
    assert answer.dropped_quotes == 0
    assert citations_are_in_the_text(shelf, answer)
    for citation in answer.citations:
        assert citation.quote.startswith("The warranty")
        assert citation.quote.endswith("delivery.")


def test_o15_a_second_question_reads_the_document_from_the_cache(shelf, engine):
    shelf.add(TEXT + " This is another copy.")
    first = answered(shelf, engine.client, "warranty of the pump", mode=AskMode.FULL, max_tokens=4)
    other = "months from delivery of the pump"
    second = answered(shelf, engine.client, other, mode=AskMode.FULL, max_tokens=4)
    assert first.usage.cached_tokens < len(TEXT) / 2
    assert second.usage.cached_tokens > len(TEXT) / 2
    assert second.miss_reason is None
