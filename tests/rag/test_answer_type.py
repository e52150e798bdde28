"""A quote without the kind of thing asked for is no answer."""

import pytest

from ragflash.rag.answer_type import AnswerType, expected, holds, holds_words, names


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("How many days are there?", AnswerType.COUNT),
        ("how LONG may it take?", AnswerType.DURATION),
        ("How much does it cost?", AnswerType.AMOUNT),
        ("How many times is it sent?", AnswerType.FREQUENCY),
        ("What is the largest size?", AnswerType.BOUND),
        ("Which port is used?", AnswerType.PORT),
        ("In which year was it founded?", AnswerType.DATE),
        ("  When was it founded?", AnswerType.DATE),
        ("Who founded it?", AnswerType.PERSON),
        ("Whose signature is needed?", AnswerType.PERSON),
        ("Tell me who founded it.", AnswerType.ANY),
        ("When should I call?", AnswerType.ANY),
        ("Why is the sky blue?", AnswerType.REASON),
        ("Wie viele Tage sind es?", AnswerType.ANY),
    ],
)
def test_a_question_asks_for_a_kind_of_thing(question, kind):
    assert expected(question).kind is kind


HOLDING = [
    ("How many days does it last?", "It lasts 14 days."),
    ("How many days does it last?", "It lasts twelve long days."),
    ("How many pumps are there?", "There are 3 pumps."),
    ("How many pumps are there?", "There are no pumps at all."),
    ("How long does it last?", "It is a 14-day course."),
    ("How much does it cost?", "It costs 5 euros."),
    ("How much does it cost?", "It costs $5."),
    ("What percentage is lost?", "About 5% of it is lost."),
    ("How often is it sent?", "It is sent twice a week."),
    ("How often is it sent?", "It is never sent."),
    ("What is the maximum size?", "It is limited to 40 parts."),
    ("Which port is used?", "It listens on 8080."),
    ("When was it founded?", "It was founded in 1993."),
    ("When was it closed?", "It closed at the end of march."),
    ("When was it closed?", "It closed on 3 May."),
    ("Who wrote it?", "It was written by Ada Lovelace."),
    ("Who wrote it?", "It was written by José García."),
    ("Who decides?", "The maintainers decide."),
    ("Why?", "It runs twice because the first run only counts."),
    ("Where does it run?", ""),
]


@pytest.mark.parametrize(("question", "text"), HOLDING)
def test_what_is_asked_for_is_there(question, text):
    assert holds(expected(question), text)


LACKING = [
    ("How many days does it last?", "It lasts a while."),
    ("How many days does it last?", "It has 14 parts."),
    ("How many days does it last?", "See section 14 about days."),
    ("How many pumps are there?", "It lasts 3 days."),
    ("How many bones are there?", "It is someone's bone."),
    ("How long does it last?", "It has 3 pumps."),
    ("How much does it cost?", "It has 3 pumps."),
    ("How often is it sent?", "It is sent to 3 people."),
    ("What is the maximum size?", "It has 40 parts."),
    ("Which port is used?", "It listens on a port."),
    ("When was it founded?", "You may found it."),
    ("When was it founded?", "It has 12 parts."),
    ("Who decides?", "It decides itself."),
]


@pytest.mark.parametrize(("question", "text"), LACKING)
def test_what_is_asked_for_is_missing(question, text):
    assert not holds(expected(question), text)


def test_numbers_of_the_question_do_not_count():
    asked = expected("How long does lesson 12 of 12 days take?")
    assert not holds(asked, "Go on with the 12 days.")
    assert holds(asked, "It takes 3 days.")


def test_a_reason_is_marked():
    assert not holds(expected("Why was it closed?"), "It was closed in June.")


def test_names_codes_and_numbers_are_listed():
    question = "Which limit does Firefox set in about_config for port 8080?"
    assert names(question) == {"firefox", "about_config", "8080"}
    assert names("Wie lange hält die Pumpe von Firefox?") == frozenset()


def test_a_limit_must_be_spoken_of():
    asked = expected("How many pumps may it have at most?")
    assert holds(asked, "It must not have more than 3 pumps.")
    assert not holds(asked, "It has 3 pumps.")


@pytest.mark.parametrize(
    "question",
    [
        "Was ist das Maximum an Paketen?",
        "Will man mehr als das Minimum?",
        "Quel est le nombre maximum de paquets ?",
        "1 時間に何回まで送れますか。",
        "最多可以有多少个软件包？",
        "حداکثر چند بسته وجود دارد؟",
    ],
)
def test_a_question_in_another_language_asks_for_anything(question):
    assert expected(question).kind is AnswerType.ANY
    assert holds(expected(question), "Anything.")


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ("Wofür ist die Datei apt_2.conf auf dem Rechner Nordsee?", {"apt_2"}),
        ("Wie viel RAM braucht der Rechner?", {"ram"}),
        ("dpkg とは何ですか。", {"dpkg"}),
        ("第4章の apt-get は?", {"apt-get"}),
        ("Installed-Size 字段是什么意思？", {"installed-size"}),
        ("شماره pid فرآیند ۴۳۷۴ چیست؟", {"pid"}),
        ("Was bedeutet α?", set()),
    ],
)
def test_names_in_other_languages_are_codes(question, named):
    assert names(question) == named


def test_a_name_ends_where_another_script_begins():
    assert holds_words("dpkgは道具である", frozenset({"dpkg"}))
    assert not holds_words("libdpkgは道具である", frozenset({"dpkg"}))
    assert not holds_words("dpkgé", frozenset({"dpkg"}))
