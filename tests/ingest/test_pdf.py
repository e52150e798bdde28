import numpy as np
import pytest
from pdf_files import IMAGE, make_pdf, text_page

from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.parsers import parse_bytes, pdf


def failure(data):
    with pytest.raises(ParseError) as caught:
        parse_bytes(data, "file.pdf")
    return caught.value.reason


def test_a_user_password_is_named():
    assert failure(make_pdf([text_page(["Secret"])], passwords=("u", "o"))) is (
        FailureReason.ENCRYPTED
    )


def test_an_owner_password_alone_does_not_matter():
    assert pdf.parse(make_pdf([text_page(["Open text"])], passwords=("", "o"))).text == "Open text"


def test_pictures_of_text_are_no_text():
    assert failure(make_pdf([IMAGE, IMAGE])) is FailureReason.NO_TEXT


@pytest.mark.parametrize("data", [b"%PDF-1.4 nothing", make_pdf([text_page(["x"])])[:200]])
def test_damage_is_named(data):
    assert failure(data) is FailureReason.CORRUPT


def test_a_page_that_cannot_be_read_makes_the_document_partial():
    pages = [text_page([f"This is page {number}."]) for number in (1, 2, 3)]
    document = pdf.parse(make_pdf(pages, missing=[2]))
    assert document.partial
    assert [bool(page.error) for page in document.pages] == [False, True, False]
    assert document.text == "This is page 1.\n\nThis is page 3."
    assert document.warnings == ("page 2 cannot be read",)


def test_a_scanned_page_among_others_is_a_warning():
    document = pdf.parse(make_pdf([text_page(["Words"]), IMAGE, b"", IMAGE, IMAGE]))
    assert not document.partial
    assert document.warnings == ("page 2, 4–5 shows something but has no text (a scan?)",)


def test_pages_and_labels():
    pages = [text_page(["keep records and shall"]), text_page(["produce them."])]
    document = pdf.parse(make_pdf(pages, labels="0 << /S /r /St 3 >>", title="Terms"))
    assert document.text == "keep records and shall\nproduce them."
    assert [(page.number, page.label) for page in document.pages] == [(1, "iii"), (2, "iv")]
    assert (document.pages[0].width, document.pages[0].height) == (612, 792)
    assert [document.page_at(offset).number for offset in (0, 22, 23, 36)] == [1, 1, 2, 2]
    assert document.title == "Terms"


def test_every_character_has_its_box():
    document = pdf.parse(make_pdf([text_page(["First line here", "second"])]))
    boxes = document.boxes
    assert boxes.boxes.shape == (len(document.text), 4)
    lines = boxes.lines(0, len(document.text))
    assert [number for number, _ in lines] == [1, 1]
    first, second = (box for _, box in lines)
    assert first.x0 == pytest.approx(72, abs=2)
    assert first.y0 < 792 - 720 < first.y1
    assert second.y0 > first.y0 + 10
    (word,) = boxes.lines(6, 10)
    assert first.x0 < word[1].x0 < word[1].x1 < first.x1


@pytest.mark.parametrize(
    ("rotate", "corner"),
    [(0, (72, 72)), (90, (720, 72)), (180, (540, 720)), (270, (72, 540))],
)
def test_boxes_are_where_the_turned_page_shows_them(rotate, corner):
    document = pdf.parse(make_pdf([text_page(["Turned"])], rotate=rotate))
    ((_, box),) = document.boxes.lines(0, 1)
    assert abs(box.x0 - corner[0]) < 16
    assert abs(box.y0 - corner[1]) < 16
    assert (document.pages[0].width > document.pages[0].height) == (rotate in (90, 270))


def test_boxes_count_from_the_shown_corner():
    shifted = pdf.parse(make_pdf([text_page(["Word"])], media_box=(50, 100, 662, 892)))
    plain = pdf.parse(make_pdf([text_page(["Word"])]))
    shift = plain.boxes.boxes - shifted.boxes.boxes
    assert np.allclose(shift, [50, -100, 50, -100], atol=0.1)


def test_a_line_end_hyphen_stays_with_its_line_break():
    document = pdf.parse(make_pdf([text_page(["the infrastruc-", "ture of things"])]))
    assert document.text == "the infrastruc-\nture of things"


def test_wide_gaps_indents_and_sizes_make_paragraphs():
    lines = [(72, 700 - 14 * row, f"A line of text number {row} stands here") for row in range(4)]
    lines += [(72, 620, "After a gap a line"), (72, 606, "and its second one,")]
    lines += [(92, 592, "an indented one"), (72, 578, "and what follows it.")]
    paragraphs = pdf.parse(make_pdf([text_page(lines)])).text.split("\n\n")
    assert [part.count("\n") + 1 for part in paragraphs] == [4, 2, 2]


def test_the_outline_gives_sections_where_their_titles_stand():
    pages = [
        text_page(["Some words.", "1 Getting started", "Text."]),
        text_page(["Here the title is absent."]),
    ]
    outline = [("Getting started", 1), ("Elsewhere", 2)]
    document = pdf.parse(make_pdf(pages, outline=outline))
    found = [(section.title, section.level) for section in document.sections]
    assert found == [("Getting started", 1), ("Elsewhere", 1)]
    assert document.text[document.sections[0].start :].startswith("1 Getting started")
    assert document.sections[1].start == document.pages[1].start
    assert document.section_path(document.pages[1].start + 5) == ("Elsewhere",)


def test_running_heads_page_numbers_and_contents_lines_are_furniture():
    pages = [
        text_page(["The Manual", f"Words of page {number} of it", "w" * number, str(number)])
        for number in range(7, 12)
    ]
    pages[0] = text_page(["The Manual", "1 Scope . . . . . . . . 8", "1.1 Terms ........ 9", "7"])
    document = pdf.parse(make_pdf(pages))
    furniture = [document.text[start:end] for start, end in document.furniture]
    assert furniture[:4] == ["The Manual", "1 Scope . . . . . . . . 8", "1.1 Terms ........ 9", "7"]
    assert furniture[4:6] == ["The Manual", "8"]
    assert len(furniture) == 12
    assert "Words of page 8 of it" not in furniture
    assert [page.label for page in document.pages] == ["7", "8", "9", "10", "11"]


def test_progress_counts_pages():
    steps = []
    pdf.parse(make_pdf([text_page(["x"])] * 3), lambda *step: steps.append(step))
    assert steps == [("pages", 1, 3), ("pages", 2, 3), ("pages", 3, 3)]


def test_a_text_is_never_all_furniture():
    document = pdf.parse(make_pdf([text_page(["The same words."])] * 4))
    assert document.furniture == ()
