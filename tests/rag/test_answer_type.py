import pytest

from ragflash.rag.answer_type import AnswerType, expected, holds


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("How many days are there?", AnswerType.NUMBER),
        ("how LONG may it take?", AnswerType.NUMBER),
        ("What is the default port?", AnswerType.NUMBER),
        ("In which year was it founded?", AnswerType.DATE),
        ("  When was it founded?", AnswerType.DATE),
        ("Who founded it?", AnswerType.PERSON),
        ("Whose signature is needed?", AnswerType.PERSON),
        ("Tell me who founded it.", AnswerType.ANY),
        ("When should I call?", AnswerType.ANY),
        ("Why is the sky blue?", AnswerType.ANY),
        ("Wie viele Tage sind es?", AnswerType.ANY),
    ],
)
def test_a_question_asks_for_a_kind_of_thing(question, kind):
    assert expected(question) is kind


@pytest.mark.parametrize(
    ("kind", "text", "is_there"),
    [
        (AnswerType.NUMBER, "It lasts 14 days.", True),
        (AnswerType.NUMBER, "It is sent twice a week.", True),
        (AnswerType.NUMBER, "There is no limit.", True),
        (AnswerType.NUMBER, "It lasts a while.", False),
        (AnswerType.NUMBER, "It is someone's bone.", False),
        (AnswerType.DATE, "It was founded in 1993.", True),
        (AnswerType.DATE, "It closes at the end of march.", True),
        (AnswerType.DATE, "It closes on 3 May.", True),
        (AnswerType.DATE, "You may close it.", False),
        (AnswerType.DATE, "It has 12 parts.", False),
        (AnswerType.PERSON, "It was written by Ada Lovelace.", True),
        (AnswerType.PERSON, "It was written by José García.", True),
        (AnswerType.PERSON, "The maintainers decide.", True),
        (AnswerType.PERSON, "It decides itself.", False),
        (AnswerType.ANY, "", True),
    ],
)
def test_a_text_holds_the_kind_or_not(kind, text, is_there):
    assert holds(kind, text, "?") is is_there


def test_numbers_of_the_question_do_not_count():
    question = "How long does step 12 take?"
    assert not holds(AnswerType.NUMBER, "Go on with step 12.", question)
    assert holds(AnswerType.NUMBER, "Step 12 takes 3 days.", question)
