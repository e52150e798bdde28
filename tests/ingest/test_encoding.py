import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.encoding import decode
from ragflash_ingest.parsers import parse_bytes

LABEL = "Warranty: 36 months\r\nSerial: ZX-4471-Ω\r\n"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"\xff\xfe" + LABEL.encode("utf-16-le"), "utf-16-le"),
        (b"\xfe\xff" + LABEL.encode("utf-16-be"), "utf-16-be"),
        (b"\xef\xbb\xbf" + LABEL.encode(), "utf-8"),
        (LABEL.encode(), "utf-8"),
        (LABEL.encode("utf-16-le"), "utf-16-le"),
        (LABEL.encode("utf-16-be"), "utf-16-be"),
        (LABEL.encode("utf-32"), "utf-32-le"),
    ],
)
def test_marks_and_unicode_forms_give_one_text(data, encoding):
    document = parse_bytes(data, "label.txt")
    assert document.text == "Warranty: 36 months\nSerial: ZX-4471-Ω\n"
    assert document.encoding == encoding
    start = document.text.index("ZX-4471-Ω")
    assert document.text[start : start + 9] == "ZX-4471-Ω"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Das Gerät läuft über 3 Jahre – “sehr” gut für Müller."),
        ("cp1252", "It’s a 5€ café"),
        ("cp1252", "Garantía: 36 meses. ¿Cuándo?"),
        ("cp1250", "Zażółć gęślą jaźń w pełni słońca, „cytat”"),
        ("iso8859-2", "Příliš žluťoučký kůň"),
        ("cp1251", "Гарантия 36 месяцев со дня покупки"),
        ("cp1251", "Гарантійний термін: 36 місяців"),
        ("koi8-r", "Гарантия 36 месяцев со дня покупки"),
        ("cp866", "Гарантия 36 месяцев со дня покупки"),
        ("cp1253", "Εγγύηση: 36 μήνες. Σειριακός αριθμός"),
        ("cp1254", "Garanti süresi: 36 ay. Türkiye'nin başkenti, İstanbul ığdır"),
        ("cp1255", "אחריות לשלוש שנים מיום הקנייה"),
        ("cp1256", "الضمان لمدة ثلاث سنوات من تاريخ الشراء"),
        ("cp874", "รับประกัน 36 เดือน นับจากวันที่ซื้อ"),
        ("shift_jis", "保証期間：36ヶ月\n製造番号：ZX-4471-Ω\n"),
        ("euc_jp", "保証期間は36か月です。これはテストです。"),
        ("iso2022_jp", "保証期間は36か月です。"),
        ("gb18030", "保修期：36个月。序列号：ZX-4471。这是一个测试文档。"),
        ("big5", "保固期限：三十六個月。這是一個測試文件。"),
        ("euc_kr", "보증 기간: 36개월. 이것은 시험 문서입니다."),
    ],
)
@pytest.mark.parametrize("times", [1, 50])
def test_legacy_encodings_are_recognised(encoding, text, times):
    lines = (text + "\n") * times
    decoded = decode(lines.encode(encoding))
    assert decoded.text == lines
    assert encoding == "iso2022_jp" or decoded.warnings


@pytest.mark.parametrize(
    "data",
    [
        "Die Länge beträgt größer".encode("mac_roman"),
        bytes(range(0x80, 0xFF)),
        b"\xff\xfe\x00\xd8",
        b"half a character \xe3\x81",
        b"\xef\xbb\xbfnot UTF-8: \xff",
    ],
)
def test_what_reads_like_nothing_is_refused(data):
    with pytest.raises(ParseError) as caught:
        decode(data)
    assert caught.value.reason is FailureReason.ENCODING_UNKNOWN


def test_stray_bytes_in_utf8_are_mended_and_reported():
    decoded = decode(("Größe – " * 10).encode() + b"5\x96 6")
    assert decoded.text.endswith("5– 6")
    assert decoded.encoding == "utf-8"
    assert "1 bytes" in decoded.warnings[0]


def test_a_declared_encoding_is_believed_only_where_it_fits():
    assert decode("Länge".encode("mac_roman"), declared="macintosh").text == "Länge"
    assert decode("Länge".encode(), declared="latin-1").text == "Länge"
    assert decode("Das Gerät läuft".encode("cp1252"), declared="no-such").encoding == "cp1252"


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_utf8_is_never_taken_for_anything_else(text):
    assert decode(b"\xef\xbb\xbf" + text.encode()).text == text
    if not text.startswith("\ufeff"):
        assert decode(text.encode()).text == text
