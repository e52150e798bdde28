import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash_ingest.names import MAX_CHARS, safe_display_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../x.txt", "x.txt"),
        ("..\\x.txt", "x.txt"),
        ("/etc/x.txt", "x.txt"),
        ("C:\\x.txt", "x.txt"),
        ("C:x.txt", "x.txt"),
        ("a/../../x.txt", "x.txt"),
        (".bashrc", "bashrc"),
        ("ｘ／ｙ.txt", "ｙ.txt"),
        ("a∕b⁄c＼d.txt", "d.txt"),
        ("  report.pdf ", "report.pdf"),
        ("Bericht über 2024 (neu).pdf", "Bericht über 2024 (neu).pdf"),
        ("報告書.pdf", "報告書.pdf"),
    ],
)
def test_names_keep_their_last_part(name, shown):
    assert safe_display_name(name) == shown


@pytest.mark.parametrize(
    "name",
    ["x.txt\0.pdf", "a\nb", "", " ", "..", "/", "a/", "...", "x" * 300, "a\u202etxt.exe", "\ud800"],
)
def test_names_that_cannot_be_shown_are_refused(name):
    with pytest.raises(ValueError, match="file name"):
        safe_display_name(name)


@given(st.text())
def test_what_is_shown_is_harmless_and_stable(name):
    try:
        shown = safe_display_name(name)
    except ValueError:
        return
    assert shown
    assert not {"Cc", "Cs", "Zl", "Zp"} & set(map(unicodedata.category, shown))
    assert not set("/\\\0\n") & set(shown)
    assert not shown.startswith(".")
    assert len(shown) <= MAX_CHARS
    assert safe_display_name(shown) == shown
