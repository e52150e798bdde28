import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash_ingest.normalise import normalise

MIXED = "The efﬁcient Po\u00ad\nlitik of ﬂuid con-\ntrol and a well-known state-of-the-art test"

# Plain random text seldom holds what this module is about: make such places frequent.
KNOTS = st.sampled_from(
    ["-\n", "\u00ad", "\u00ad\n", "\ufffe\n", " ", "\n", "\r\n", "\u200b", "\u0301", "\u3000", "´"]
) | st.sampled_from("ﬁㅎㅏé東京か゛\uff9e“—aB-7각\u11a8")
TEXTS = st.lists(KNOTS | st.text(max_size=3), max_size=30).map("".join)


@pytest.mark.parametrize(
    ("needle", "where"),
    [
        ("efficient", (4, 12)),
        ("Politik", (13, 22)),
        ("fluid", (26, 30)),
        ("control", (31, 40)),
        ("con-trol", (31, 40)),
        ("well-known", (47, 57)),
        ("state-of-the-art", (58, 74)),
        ("efﬁcient Po\u00ad\nlitik", (4, 22)),
    ],
)
def test_words_cut_or_fused_by_typesetting_are_found(needle, where):
    assert normalise(MIXED).find(needle) == where


@pytest.mark.parametrize("needle", ["well-known", "wellknown"])
def test_a_line_end_hyphen_is_searchable_in_both_forms(needle):
    assert normalise("a well-\nknown test").find(needle) == (2, 13)


def test_a_hyphen_that_was_never_there_is_not_accepted():
    assert normalise("a wellknown test").find("well-known") is None
    assert normalise("a well-known test").find("wellknown") is None


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("state-\nof-the-art", "state-of-the-art"),
        ("state-of-\nthe-art", "state-of-the-art"),
        ("Anglo-\nSaxon", "Anglo-Saxon"),
        ("pages 10-\n20", "pages 10-20"),
        ("a dash -\nnot a hyphen", "a dash - not a hyphen"),
        ("in\ufffe\nfrastructure", "infrastructure"),
        ("in\ufffefrastructure", "in-frastructure"),
        ("東京都の\n人口", "東京都の人口"),
        ("東京都。\n\n人口", "東京都。 人口"),
        ("“It’s”\u00a0—\u2009so", '"It\'s" - so'),
        ("zero\u200bwidth \u200b space", "zerowidth space"),
        ("a \t\r\n\u3000 b", "a b"),
        ("ＡＢＣ１２３ ½", "ABC123 1⁄2"),
        ("e\u0301", "é"),
        ("e\u200b\u0301", "é"),
        ("Straße ΟΔΟΣ", "Straße ΟΔΟΣ"),
    ],
)
def test_search_form(text, form):
    assert normalise(text).text == form


def test_a_quote_over_a_page_break():
    page_1 = "Section 4. The supplier shall keep records for seven years and shall"
    page_2 = "produce them within ten days of a written request. Section 5."
    text = normalise(f"{page_1}\n{page_2}")
    start, end = text.find("keep records for seven years and shall produce them within ten days")
    assert start == 30
    assert end == len(page_1) + 1 + 28
    assert text.find("keep records for eight years and shall") is None


def test_every_place_is_found():
    assert list(normalise("ab-\ncd, abcd, ab-cd").find_all("ab-cd")) == [(0, 6), (14, 19)]
    assert list(normalise("anything").find_all(" \u200b ")) == []


@given(TEXTS)
def test_offsets_are_monotone_and_in_bounds(text):
    form = normalise(text)
    assert len(form.text) == len(form.offsets) == len(form.ends)
    assert (form.offsets < form.ends).all()
    assert (np.diff(form.offsets) >= 0).all()
    assert (np.diff(form.ends) >= 0).all()
    if form.text:
        assert form.offsets[0] >= 0
        assert form.ends[-1] <= len(text)


@given(TEXTS)
def test_normalising_twice_changes_nothing(text):
    once = normalise(text).text
    assert normalise(once).text == once


@given(TEXTS)
def test_the_form_is_nfkc_but_for_spacing_accents(text):
    form = normalise(text).text
    if not any("  " in f" {unicodedata.normalize('NFKC', char)}" for char in text):
        assert unicodedata.is_normalized("NFKC", form)


@given(TEXTS, st.data())
def test_the_original_of_a_range_reads_the_same(text, data):
    """Holds between originals, but for what a hyphen or space at the very edge becomes."""
    form = normalise(text)
    if not form.text:
        return
    start = data.draw(st.integers(0, len(form.text) - 1))
    end = data.draw(st.integers(start + 1, len(form.text)))
    original_start, original_end = form.original_range(start, end)
    while start and form.offsets[start - 1] == original_start:
        start -= 1
    while end < len(form.text) and form.ends[end] == original_end:
        end += 1
    again = normalise(text[original_start:original_end])
    assert re.sub("[- ]", "", again.text) == re.sub("[- ]", "", form.text[start:end])


@pytest.mark.parametrize(("start", "end"), [(0, 0), (2, 1), (-1, 2), (0, 99)])
def test_ranges_outside_the_text_are_refused(start, end):
    with pytest.raises(ValueError, match="no range"):
        normalise("abc").original_range(start, end)
