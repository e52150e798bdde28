import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ragflash_ingest import wire
from ragflash_ingest.document import Box, BoxTable, Document, DocumentPage, Section

SIDES = st.floats(-20_000, 20_000, width=32) | st.just(np.nan)
BOXES = arrays(np.float32, st.tuples(st.integers(0, 20), st.just(4)), elements=SIDES)


def document(**changes):
    fields = {
        "text": "Ab\ncd",
        "pages": (DocumentPage(1, "i", 0, 2, 10.0, 20.0), DocumentPage(2, None, 3, 5, error="bad")),
        "sections": (Section("A", 1, 0), Section("C", 3, 3), Section("D", 2, 4)),
        "media_type": "application/pdf",
        "encoding": None,
        "warnings": ("w",),
        "parser": "p 1",
        "furniture": ((0, 1),),
        "title": "T ÿ 𝔘",
    }
    return Document(**(fields | changes))


@given(BOXES)
def test_boxes_survive_storage_exactly(boxes):
    table = BoxTable.rounded(boxes, (0, 3))
    again = BoxTable.from_bytes(table.to_bytes())
    assert again.page_starts == (0, 3)
    assert np.array_equal(again.boxes, table.boxes, equal_nan=True)


@pytest.mark.parametrize("data", [b"", b"RFB1", b"RFB1" + bytes(8) + b"x", b"other bytes entirely"])
def test_damaged_boxes_are_refused(data):
    with pytest.raises(ValueError, match="box table"):
        BoxTable.from_bytes(data)


def test_one_box_a_line_and_page():
    none = [np.nan] * 4
    rows = [
        [0, 0, 5, 10], [5, 0, 9, 10], none, [0, 12, 5, 22],  # two lines
        [60, 12, 65, 22],  # behind a gutter
        none, [0, 12, 5, 22], [5, 9, 8, 15],  # next page, with a raised mark
    ]  # fmt: skip
    table = BoxTable(np.array(rows, np.float32), (0, 6))
    assert table.lines(0, 8) == [
        (1, Box(0, 0, 9, 10)),
        (1, Box(0, 12, 5, 22)),
        (1, Box(60, 12, 65, 22)),
        (2, Box(0, 9, 8, 22)),
    ]
    assert table.lines(2, 3) == []
    assert table.lines(-5, 99) == table.lines(0, 8)


def test_pages_must_cover_the_text():
    with pytest.raises(ValueError, match="page 1"):
        document(pages=(DocumentPage(1, None, 1, 5),))
    with pytest.raises(ValueError, match="cover"):
        document(pages=(DocumentPage(1, None, 0, 4),))


def test_sections_around_a_place():
    whole = document()
    paths = [whole.section_path(offset) for offset in (0, 2, 3, 4)]
    assert paths == [("A",), ("A",), ("A", "C"), ("A", "D")]
    assert whole.partial


def test_documents_survive_storage():
    boxes = BoxTable.rounded(np.array([[0, 0, 1, 1]] * 5, np.float32), (0, 3))
    whole = document(boxes=boxes)
    again = wire.from_json(wire.to_json(whole), boxes.to_bytes())
    assert np.array_equal(again.boxes.boxes, boxes.boxes)
    for name in whole.__slots__:
        if name != "boxes":
            assert getattr(again, name) == getattr(whole, name)
    assert wire.from_json(wire.to_json(document())).boxes is None


def test_documents_survive_the_pipe():
    boxes = BoxTable.rounded(np.array([[0, 0, 1, 1]] * 4 + [[np.nan] * 4], np.float32), (0, 3))
    whole = document(boxes=boxes)
    again = wire.from_parts(*wire.to_parts(whole))
    assert np.array_equal(again.boxes.boxes, boxes.boxes, equal_nan=True)
    assert again.boxes.page_starts == tuple(page.start for page in whole.pages)
    assert again.text == whole.text
    assert wire.from_parts(*wire.to_parts(document())).boxes is None


def test_boxes_that_do_not_fit_the_text_are_refused():
    body, boxes = wire.to_parts(document(boxes=BoxTable(np.zeros((5, 4), np.float32), (0,))))
    with pytest.raises(ValueError, match="reshape"):
        wire.from_parts(body, boxes[16:])
