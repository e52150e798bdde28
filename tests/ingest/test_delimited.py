import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import check_ranges

from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.parsers import parse_bytes
from ragflash_ingest.sniff import MediaType


@pytest.mark.parametrize(
    ("data", "name", "text"),
    [
        (b"Name,Town\nAnn,Ulm\n", "a.csv", "Name | Town\nAnn | Ulm"),
        (b"Name;Sum\r\nAnn;1,5\r\nBob;2,5\r\n", "a.csv", "Name | Sum\nAnn | 1,5\nBob | 2,5"),
        (b"a|b\n1|2\n", "a.csv", "a | b\n1 | 2"),
        (b"a\tb,c\n1\t2\n", "a.tsv", "a | b,c\n1 | 2"),
        (b"sep=;\na,x;b\n1;2\n", "a.csv", "a,x | b\n1 | 2"),
        (b'Name,Note\nAnn,"two\nlines, ""so"""\n', "a.csv", 'Name | Note\nAnn | two lines, "so"'),
        (b"one\ntwo\n", "a.csv", "one\ntwo"),
        (b"a,b,c\n\n,,\n1,,3\n", "a.csv", "a | b | c\n1 |  | 3"),
        ("Name,Ort\nJörg,Köln\n".encode("cp1252"), "a.csv", "Name | Ort\nJörg | Köln"),
        (b"\xef\xbb\xbfName,Town\nAnn,Ulm\n", "a.csv", "Name | Town\nAnn | Ulm"),
        ("Name,Ort\nJörg,Köln\n".encode("utf-16"), "a.csv", "Name | Ort\nJörg | Köln"),
    ],
)
def test_rows_become_lines(data, name, text):
    document = parse_bytes(data, name)
    assert document.text == text
    check_ranges(document)


def test_the_encoding_is_named():
    document = parse_bytes("Name,Ort\nJörg,Köln\n".encode("cp1252"), "a.csv")
    assert (document.encoding, document.media_type) == ("cp1252", MediaType.CSV)
    assert document.warnings == ("the encoding was guessed: cp1252",)


def test_every_part_of_a_long_table_knows_its_columns():
    rows = "".join(f"sensor {row},{row}\n" for row in range(300))
    parts = chunk(parse_bytes(b"Sensor,Value\n" + rows.encode(), "a.csv"))
    assert len(parts) > 3
    assert {part.section for part in parts} == {"Sensor | Value"}


def test_a_table_with_broken_quotes_is_text_and_says_so():
    document = parse_bytes(b'a,b\n"1,2\n', "a.csv")
    assert document.text == 'a,b\n"1,2\n'
    assert document.warnings == (
        "the table's quotes are not well formed; it is shown as it was written",
    )


@pytest.mark.parametrize("data", [b"", b" \n", b",,\n,,\n", b"sep=;\n"])
def test_a_table_without_a_word_is_empty(data):
    with pytest.raises(ParseError) as caught:
        parse_bytes(data, "a.csv")
    assert caught.value.reason is FailureReason.EMPTY


@given(st.lists(st.lists(st.text("ab,\"\n'; ", max_size=6), min_size=2, max_size=4), max_size=6))
def test_any_table_that_a_writer_makes_is_read(rows):
    target = io.StringIO()
    csv.writer(target).writerows([["first", "second"], *rows])
    document = parse_bytes(target.getvalue().encode(), "a.csv")
    assert document.text.startswith("first")
    check_ranges(document)
