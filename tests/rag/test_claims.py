"""A sentence with a fact that no quote holds does not leave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.rag.claims import supported_text

QUOTE = "Records of the Ann Arbor office are kept for 17 days after the annual audit of 2021-05-03."
QUESTION = "How long are the records of the office kept?"


def kept(written: str, quote: str = QUOTE, question: str = QUESTION) -> str:
    return supported_text(written, [quote], question)


@pytest.mark.parametrize(
    "written",
    [
        "Records are kept for 17 days.",
        "The records are kept for 17 days after the audit.",
        "The records of the Ann Arbor office are kept for 17 days.",
        "The audit of 2021 is annual.",
        "The office keeps records for 17 days.",
    ],
)
def test_what_the_quote_says_stays(written):
    assert kept(written) == written


@pytest.mark.parametrize(
    "written",
    [
        "The records of the office are kept for 19 days after the annual audit.",
        "The records of the office are kept for 7 days after the annual audit.",
        "The records of the office are kept for 1 day after the annual audit.",
        "The records of the office are kept after the annual audit by Ann Smith for 17 days.",
        "The records of the office are kept by Ann Arb for 17 days after the annual audit.",
        "The records of the office are kept for 17 days after the annual audit in USA.",
        "Rockets fly to distant planets.",
        "...",
        "",
    ],
)
def test_an_invented_number_name_or_matter_goes(written):
    assert kept(written) == ""


def test_part_of_a_decimal_is_another_number():
    quote = "The fee of the office is 1.5 percent of the price."
    assert kept("The fee of the office is 5 percent of the price.", quote) == ""
    same = "The fee of the office is 1.5 percent of the price."
    assert kept(same, quote) == same


def test_parts_of_a_range_may_be_used_alone():
    quote = "The office is open from 9-17 on working days."
    assert kept("The office is open from 9 to 17.", quote) == "The office is open from 9 to 17."


def test_only_the_sentences_before_the_first_unsupported_one_stay():
    first = "Records are kept for 17 days."
    assert kept(f"{first} Then 99 monkeys eat them. {first}") == first


def test_the_question_supports_too():
    question = "Does the office of Springfield keep records for 17 days?"
    written = "Yes, the office of Springfield keeps records for 17 days."
    assert kept(written, question=question) == written


@pytest.mark.parametrize("label", ["Answer: ", "Answer:\n", " Answer:  "])
def test_a_label_before_the_answer_is_taken_off(label):
    assert kept(f"{label}Records are kept for 17 days.") == "Records are kept for 17 days."


def test_spelling_variants_of_the_source_do_not_matter():
    quote = "The ﬁnal report is kept for 17\xa0days by the state‑run oﬃce."
    assert kept("The final report is kept for 17 days.", quote)


@given(st.text())
def test_nothing_is_added(written):
    result = kept(written)
    assert "".join(result.split()) in "".join(written.split())
