import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash_ingest.sentences import sentences


def cut(text, **options):
    return [text[start:end] for start, end in sentences(text, **options)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Smith paid 3.50 dollars. He left.", ["Dr. Smith paid 3.50 dollars.", "He left."]),
        ("J. R. Smith, e.g. at home, sat. Then", ["J. R. Smith, e.g. at home, sat.", "Then"]),
        ("See Fig. 3 and No. 7. Done.", ["See Fig. 3 and No. 7.", "Done."]),
        ('"Why?" he asked. "So."', ['"Why?" he asked.', '"So."']),
        ("Das gilt z.B. hier. Und bzw. Dort.", ["Das gilt z.B. hier.", "Und bzw. Dort."]),
        ("Er endet am 1. Mai. Das ist alles.", ["Er endet am 1. Mai.", "Das ist alles."]),
        (
            "Es war im 19. Jahrhundert. See 3. Then",
            ["Es war im 19. Jahrhundert.", "See 3.", "Then"],
        ),
        ("چرا؟ زیرا چنین است. بله!", ["چرا؟", "زیرا چنین است.", "بله!"]),
        (
            "これは本です。それは「何！」と言った。終わり",
            ["これは本です。", "それは「何！」", "と言った。", "終わり"],
        ),
        ("यह एक है। वह दो है।", ["यह एक है।", "वह दो है।"]),
        ("ما هذا؟ هذا كتاب.", ["ما هذا؟", "هذا كتاب."]),
        ("Title\n\nFirst. Second.\n\n\nThird.", ["Title", "First.", "Second.", "Third."]),
        ("• one thing\n• another thing\n12\n", ["one thing", "another thing"]),
        ("1. Install it.\n2. Run it. Twice.", ["Install it.", "Run it.", "Twice."]),
        ("# Head\nBody text.", ["Head", "Body text."]),
        ("Name | Age\nAnn | 12", ["Name | Age", "Ann | 12"]),
        ("```sh\nrun it\n```\n| a | b |\n|---|---|", ["run it", "| a | b |"]),
        ("  ...  \n\n 42 ", []),
        ("", []),
    ],
)
def test_cuts(text, expected):
    assert cut(text) == expected


def test_wrapped_lines_are_one_sentence_and_short_lines_are_not():
    text = (
        "3.1 Exit Status\n"
        "The exit status of an executed command is the value returned by the shell\n"
        "call or an equivalent function. Exit statuses fall between 0 and 255, though,\n"
        "as explained below, the shell may use values above 125 specially.\n"
        "echo $?\n"
        "For the shell's purposes, a command which exits with a zero exit status has\n"
        "succeeded."
    )
    assert cut(text) == [
        "3.1 Exit Status",
        "The exit status of an executed command is the value returned by the shell\n"
        "call or an equivalent function.",
        "Exit statuses fall between 0 and 255, though,\n"
        "as explained below, the shell may use values above 125 specially.",
        "echo $?",
        "For the shell's purposes, a command which exits with a zero exit status has\nsucceeded.",
    ]


def test_a_short_line_before_a_full_one_in_lower_case_is_no_end():
    text = (
        "The setup will differ from\nhost to host, so that no program should assume any location."
    )
    assert cut(text) == [text]


def test_skipped_ranges_are_in_no_sentence():
    text = "It shall keep the records and\nPage 3\nproduce them on request."
    start = text.index("Page")
    assert cut(text, skip=[(start, start + 6)]) == [
        "It shall keep the records and",
        "produce them on request.",
    ]


PIECES = st.sampled_from(
    ["A b. ", "c! ", "\n", "\n\n", "。", "1. ", "• ", "e.g. ", " ", "é", "?\n"]
)


@given(st.lists(PIECES).map("".join))
def test_ranges_ascend_and_are_clean(text):
    previous = 0
    for start, end in sentences(text):
        assert previous <= start < end <= len(text)
        assert text[start:end] == text[start:end].strip()
        assert any(char.isalpha() for char in text[start:end])
        previous = end
