"""Small PDF files, written by hand from ISO 32000-1: text lines, outline, labels, encryption."""

import hashlib
import struct

PAD = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")
IMAGE = b"q 200 0 0 200 100 300 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \x80 EI Q"


def text_page(lines, *, left=72, top=720, leading=14, size=12):
    """Content stream with one line below the other; `lines` may hold (x, y, text) tuples."""
    parts = [f"BT /F1 {size} Tf".encode()]
    for row, line in enumerate(lines):
        x, y, text = line if isinstance(line, tuple) else (left, top - leading * row, line)
        shown = text.encode("cp1252").replace(b"\\", b"\\\\").replace(b"(", b"\\(")
        parts.append(f"1 0 0 1 {x} {y} Tm (".encode() + shown.replace(b")", b"\\)") + b") Tj")
    return b"\n".join([*parts, b"ET"])


def make_pdf(
    contents,
    *,
    missing=(),
    rotate=0,
    media_box=(0, 0, 612, 792),
    labels=None,
    outline=(),
    title=None,
    passwords=None,
):
    """A PDF of pages with these content streams.

    Args:
        missing: Physical numbers of pages whose object is left out.
        labels: Source of the /Nums array of page labels.
        outline: Pairs of title and physical page number.
        passwords: (user, owner) for 40-bit RC4.
    """
    count = len(contents)
    page_ids = [10 + 2 * index for index in range(count)]
    outline_ids = [10 + 2 * count + index for index in range(len(outline))]
    kids = " ".join(f"{page} 0 R" for page in page_ids)
    extra = f" /PageLabels << /Nums [{labels}] >>" if labels else ""
    extra += " /Outlines 4 0 R" if outline else ""
    objects = {
        1: f"<< /Type /Catalog /Pages 2 0 R{extra} >>".encode(),
        2: f"<< /Type /Pages /Kids [{kids}] /Count {count} >>".encode(),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    }
    box = " ".join(map(str, media_box))
    streams = {}
    for number, (page, content) in enumerate(zip(page_ids, contents, strict=True), start=1):
        streams[page + 1] = content
        if number not in missing:
            objects[page] = (
                f"<< /Type /Page /Parent 2 0 R /MediaBox [{box}] /Rotate {rotate} "
                f"/Resources << /Font << /F1 3 0 R >> >> /Contents {page + 1} 0 R >>"
            ).encode()
    if outline:
        first, last = outline_ids[0], outline_ids[-1]
        objects[4] = f"<< /First {first} 0 R /Last {last} 0 R /Count {len(outline)} >>".encode()
        for place, (own, (text, number)) in enumerate(zip(outline_ids, outline, strict=True)):
            following = f" /Next {own + 1} 0 R" if place + 1 < len(outline) else ""
            objects[own] = (
                f"<< /Title ({text}) /Parent 4 0 R{following} "
                f"/Dest [{page_ids[number - 1]} 0 R /Fit] >>"
            ).encode()
    if title:
        objects[5] = f"<< /Title ({title}) >>".encode()
    trailer = "/Root 1 0 R" + (" /Info 5 0 R" if title else "")
    key = None
    if passwords:
        key, objects[6] = _encryption(*passwords)
        trailer += f" /Encrypt 6 0 R /ID [<{FILE_ID.hex()}> <{FILE_ID.hex()}>]"
    for number, content in streams.items():
        body = rc4(_object_key(key, number), content) if key else content
        head = f"<< /Length {len(body)} >>\nstream\n".encode()
        objects[number] = head + body + b"\nendstream"
    return _assemble(objects, trailer)


def _assemble(objects, trailer):
    out = bytearray(b"%PDF-1.4\n")
    offsets = {}
    for number in sorted(objects):
        offsets[number] = len(out)
        out += f"{number} 0 obj\n".encode() + objects[number] + b"\nendobj\n"
    size = max(objects) + 1
    start = len(out)
    out += f"xref\n0 {size}\n0000000000 65535 f \n".encode()
    for number in range(1, size):
        if number in offsets:
            out += f"{offsets[number]:010} 00000 n \n".encode()
        else:
            out += b"0000000000 00000 f \n"
    out += f"trailer\n<< /Size {size} {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


# ISO 32000-1 §7.6.3, revision 2: RC4 with a 40-bit key.
FILE_ID = bytes(range(16))
PERMISSIONS = -44


def rc4(key, data):
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out = bytearray()
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def _encryption(user, owner):
    user_padded, owner_padded = ((word.encode() + PAD)[:32] for word in (user, owner or user))
    owner_entry = rc4(hashlib.md5(owner_padded).digest()[:5], user_padded)
    seed = user_padded + owner_entry + struct.pack("<i", PERMISSIONS) + FILE_ID
    key = hashlib.md5(seed).digest()[:5]
    user_entry = rc4(key, PAD)
    entry = (
        f"<< /Filter /Standard /V 1 /R 2 /P {PERMISSIONS} "
        f"/O <{owner_entry.hex()}> /U <{user_entry.hex()}> >>"
    )
    return key, entry.encode()


def _object_key(key, number):
    return hashlib.md5(key + struct.pack("<I", number)[:3] + b"\0\0").digest()[:10]
