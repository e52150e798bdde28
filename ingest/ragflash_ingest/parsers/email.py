"""Mail (.eml, RFC 5322 and MIME): the headers that people read, then the text."""

from contextlib import suppress
from email import message_from_bytes
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message

from ragflash_ingest.document import Document, FailureReason, ParseError, Section
from ragflash_ingest.encoding import decode
from ragflash_ingest.parsers.html import hidden_warning, render
from ragflash_ingest.parsers.text import clean
from ragflash_ingest.parsers.writer import TextWriter
from ragflash_ingest.sniff import MediaType

PARSER = "email 1"

_SHOWN = ("Subject", "From", "To", "Cc", "Date")


def parse(data: bytes) -> Document:
    """Parse a mail. Attachments, forwarded mails among them, are named but not read.

    Raises:
        ParseError: `empty`, `corrupt` (parts nested without end) or `encoding_unknown`.
    """
    try:
        mail = message_from_bytes(data)
        body = _Body(mail)
    except RecursionError as error:
        raise ParseError(FailureReason.CORRUPT, "the mail's parts are nested too deep") from error
    writer = TextWriter()
    headers = [f"{name}: {value}" for name in _SHOWN if (value := _header(mail, name))]
    subject = _header(mail, "Subject")
    writer.block("\n".join(headers), [Section(subject, 1, 0)] if subject else [])
    for part in body.parts:
        _write_part(part, writer, body)
    warnings = tuple(f"the attachment {name} was left out" for name in body.attachments)
    return writer.document(
        MediaType.EMAIL,
        PARSER,
        warnings=(*dict.fromkeys(body.warnings), *hidden_warning(body.hidden), *warnings),
        title=subject,
    )


class _Body:
    """Parts of a mail that are its text, in order, and the names of the others."""

    def __init__(self, mail: Message) -> None:
        self.parts: list[Message] = []
        self.attachments: list[str] = []
        self.warnings: list[str] = []
        self.hidden = 0
        self._collect(mail)

    def _collect(self, part: Message) -> None:
        kind = part.get_content_type()
        if kind.startswith("multipart/"):
            self._collect_all(part, kind)
        elif part.get_content_disposition() == "attachment" or not kind.startswith("text/"):
            self.attachments.append(_attachment_name(part))
        elif kind in {"text/plain", "text/html"}:
            self.parts.append(part)
        else:
            self.attachments.append(_attachment_name(part))

    def _collect_all(self, part: Message, kind: str) -> None:
        children = [child for child in _children(part) if isinstance(child, Message)]
        if kind != "multipart/alternative":
            for child in children:
                self._collect(child)
            return
        # The same text in several forms: one of them is read, the plain one if there is one.
        kinds = [child.get_content_type() for child in children]
        for wanted in ("text/plain", "text/html"):
            if wanted in kinds:
                self._collect(children[kinds.index(wanted)])
                return
        if children:
            self._collect(children[-1])


def _children(part: Message) -> list[Message | str]:
    payload = part.get_payload()
    return payload if isinstance(payload, list) else []


def _write_part(part: Message, writer: TextWriter, body: _Body) -> None:
    payload = part.get_payload(decode=True)
    content = payload if isinstance(payload, bytes) else b""
    decoded = decode(content, declared=part.get_content_charset())
    body.warnings.extend(decoded.warnings)
    if part.get_content_type() == "text/html":
        page = render(clean(decoded.text))
        body.hidden += page.hidden
        writer.block(page.text, [])
    else:
        writer.paragraph(decoded.text)


def _header(mail: Message, name: str) -> str | None:
    found = (value for key, value in mail.raw_items() if key.lower() == name.lower())
    return _readable(str(next(found, "")))


def _readable(raw: str) -> str | None:
    """A header's words, decoded (RFC 2047) where that is possible."""
    # Bytes beyond ASCII, which only newer mails may hold, as UTF-8 (RFC 6532).
    text = raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if "=?" in text:
        with suppress(LookupError, ValueError, MessageError):  # shown as it is, then
            text = str(make_header(decode_header(text)))
    return " ".join(clean(text).split()) or None


def _attachment_name(part: Message) -> str:
    return _readable(part.get_filename() or "") or f"({part.get_content_type()})"
