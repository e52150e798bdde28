import pytest
from office_files import changed, make_pptx, members_of, zip_of
from ranges import check_ranges

from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.parsers import parse_bytes
from ragflash_ingest.sniff import MediaType


def fill(show):
    first = show.slides.add_slide(show.slide_layouts[1])
    first.shapes.title.text = "Results"
    first.placeholders[1].text = "Up by 3 %\nin May"
    first.notes_slide.notes_text_frame.text = "Mention April."
    show.slides.add_slide(show.slide_layouts[6])
    last = show.slides.add_slide(show.slide_layouts[5])
    last.shapes.title.text = "By\vregion"
    table = last.shapes.add_table(3, 2, 0, 0, 100, 100).table
    for row, cells in enumerate([["Region", "Sales"], ["North", "4"], ["", "5"]]):
        for column, text in enumerate(cells):
            table.cell(row, column).text = text
    table.cell(1, 0).merge(table.cell(2, 0))
    group = last.shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "inside a group"


def test_a_slide_is_a_page_and_its_title_a_section():
    document = parse_bytes(make_pptx(fill), "talk")
    assert document.media_type == MediaType.PPTX
    pages = [document.text[page.start : page.end] for page in document.pages]
    assert pages == [
        "Results\n\nUp by 3 %\nin May\n\nNotes: Mention April.",
        "",
        "By region\n\nRegion | Sales\nNorth | 4\nNorth | 5\n\ninside a group",
    ]
    assert [(s.title, s.level) for s in document.sections] == [("Results", 1), ("By region", 1)]
    assert document.page_at(document.text.index("group")).number == 3
    check_ranges(document)


def test_a_show_is_a_presentation():
    members = members_of(make_pptx(fill))
    types = members["[Content_Types].xml"]
    members["[Content_Types].xml"] = types.replace(
        b".presentation.main+xml", b".slideshow.main+xml"
    )
    assert members["[Content_Types].xml"] != types
    assert parse_bytes(zip_of(members), "x.ppsx").text.startswith("Results")


def test_no_entity_is_read_from_outside(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("TOP SECRET")
    entity = f'<!DOCTYPE x [<!ENTITY leak SYSTEM "{secret.as_uri()}">]>'.encode()

    def inject(old):
        head, rest = old.split(b"?>", 1)
        return head + b"?>" + entity + rest.replace(b"Results", b"Results &leak;")

    text = parse_bytes(changed(make_pptx(fill), slide1_xml=inject), "x").text
    assert "Results" in text
    assert "SECRET" not in text


def without_targets(relations):
    return relations.replace(b" Target=", b" Aim=")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (make_pptx(lambda show: None), FailureReason.EMPTY),
        (make_pptx(fill)[:-300], FailureReason.CORRUPT),
        (changed(make_pptx(fill), slide1_xml=lambda old: old[:99]), FailureReason.CORRUPT),
        (changed(make_pptx(fill), slide1_xml=lambda _: b"<x/>"), FailureReason.CORRUPT),
        (changed(make_pptx(fill), slide1_xml_rels=without_targets), FailureReason.CORRUPT),
    ],
)
def test_what_cannot_be_read_says_why(data, reason):
    with pytest.raises(ParseError) as caught:
        parse_bytes(data, "x.pptx")
    assert caught.value.reason is reason
