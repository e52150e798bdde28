"""Books (EPUB 2 and 3): the chapters in the order of the package's spine.

EPUB 3.3: container.xml (4.2.6.3.1) names the package, whose spine (5.7) names the chapters.
"""

import posixpath
import re
from collections.abc import Mapping
from urllib.parse import unquote
from xml.etree import ElementTree

from ragflash_ingest.archive import unpack
from ragflash_ingest.document import Document, FailureReason, ParseError
from ragflash_ingest.encoding import decode
from ragflash_ingest.parsers.html import hidden_warning, render
from ragflash_ingest.parsers.text import clean
from ragflash_ingest.parsers.writer import TextWriter
from ragflash_ingest.sniff import MediaType

PARSER = "epub 1"

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# `<title/>` is an empty element in XHTML, but in HTML the beginning of a title without end.
_EMPTY_ELEMENT = re.compile(r"<([A-Za-z][\w:]*)([^<>]*)/>")
_VOID_TAGS = "area base br col embed hr img input link meta param source track wbr"
_VOID = frozenset(_VOID_TAGS.split())
_DECLARED = re.compile(rb"""\A<\?xml[^>]*\bencoding\s*=\s*["']([\w.:-]+)""")


def parse(data: bytes) -> Document:
    """Parse a book; what lies outside it is not fetched.

    Raises:
        ParseError: `encrypted` (chapters under copy protection), `corrupt`, `too_large`, or
            `empty`.
    """
    members = unpack(data).texts
    package_path = _package_path(members)
    package = _xml(members, package_path)
    chapters = _chapters(package, posixpath.dirname(package_path))
    if _protected(members).intersection(chapters):
        raise ParseError(FailureReason.ENCRYPTED, "the book is under copy protection")
    writer = TextWriter()
    hidden = 0
    missing: list[str] = []
    for path in chapters:
        if path not in members:
            missing.append(f"the file lacks its chapter {path}")
            continue
        page = render(_markup(members[path]))
        writer.block(page.text, page.sections)
        hidden += page.hidden
    title = next((node.text for node in package.iter() if _name(node) == "title"), None)
    return writer.document(
        MediaType.EPUB,
        PARSER,
        warnings=(*missing, *hidden_warning(hidden)),
        title=" ".join((title or "").split()) or None,
    )


def _xml(members: Mapping[str, bytes], path: str) -> ElementTree.Element:
    # Expat reads no external entities and stops internal ones that grow.
    try:
        return ElementTree.fromstring(members[path])
    except (KeyError, ElementTree.ParseError, ValueError, LookupError) as error:
        raise ParseError(FailureReason.CORRUPT, f"the book's {path} cannot be read") from error


def _name(node: ElementTree.Element) -> str:
    """Name of an element without its namespace."""
    return node.tag.rpartition("}")[2]


def _package_path(members: Mapping[str, bytes]) -> str:
    for node in _xml(members, _CONTAINER).iter():
        if _name(node) == "rootfile" and (path := node.get("full-path")):
            return path
    raise ParseError(FailureReason.CORRUPT, "the book does not say where its contents are")


def _chapters(package: ElementTree.Element, folder: str) -> list[str]:
    """Names of members, in reading order."""
    items = {
        node.get("id"): _resolve(folder, node.get("href", ""))
        for node in package.iter()
        if _name(node) == "item"
    }
    references = (node.get("idref") for node in package.iter() if _name(node) == "itemref")
    return [items[reference] for reference in dict.fromkeys(references) if reference in items]


def _resolve(folder: str, reference: str) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(reference.partition("#")[0])))


def _protected(members: Mapping[str, bytes]) -> set[str]:
    """Members that are encrypted; fonts often are, without protecting the text."""
    if _ENCRYPTION not in members:
        return set()
    return {
        _resolve("", node.get("URI", ""))
        for node in _xml(members, _ENCRYPTION).iter()
        if _name(node) == "CipherReference"
    }


def _markup(data: bytes) -> str:
    declared = _DECLARED.search(data[:256])
    text = clean(decode(data, declared=declared[1].decode("ascii") if declared else None).text)
    return _EMPTY_ELEMENT.sub(_closed, text)


def _closed(match: re.Match[str]) -> str:
    name, attributes = match.groups()
    return match.group() if name.lower() in _VOID else f"<{name}{attributes}></{name}>"
