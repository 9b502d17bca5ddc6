"""Files that were made to harm whoever opens them, each as small as it can be."""

import random
import struct
import zlib
from io import BytesIO

import numpy
import soundfile
from PIL import Image

from tests.http.test_attachments import pdf
from tests.media.samples import PICTURES, picture, png_that_says, sample, saved, sound

_NOISE = Image.effect_noise((96, 96), 90).convert("RGB")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png_with(name: bytes, data: bytes) -> bytes:
    """A chunk before the picture."""
    whole = picture("png", 64, 64)
    return whole[:33] + _chunk(name, data) + whole[33:]


def _png_of_zeros(side: int) -> bytes:
    """As many pixels as it says, in a few bytes."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes((3 * side + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _moving(form: str, frames: int) -> bytes:
    written = BytesIO()
    first, *rest = [Image.new("RGB", (16, 16), (number % 256, 0, 0)) for number in range(frames)]
    first.save(written, form, save_all=True, append_images=rest)
    return written.getvalue()


def _gif_in_another_size() -> bytes:
    """The screen is small, and its first picture as large as they come."""
    whole = bytearray(picture("gif", 64, 64))
    at = whole.index(b"\x2c")
    whole[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    return bytes(whole)


def _bent(data: bytes, seed: int) -> bytes:
    """With some bytes behind the header that are others."""
    chance, bent = random.Random(seed), bytearray(data)
    for _ in range(12):
        bent[chance.randrange(12, len(bent))] = chance.randrange(256)
    return bytes(bent)


def _long_silence() -> bytes:
    """Half an hour and a little more, in a few kilobytes."""
    written = BytesIO()
    soundfile.write(written, numpy.zeros(1801 * 8000, "int16"), 8000, format="FLAC")
    return written.getvalue()


def _zipped(text: bytes) -> bytes:
    return zlib.compress(text, 9)


GIFTS: dict[str, bytes] = {
    "png that says it is huge": png_that_says(60_000, 60_000),
    "png that says a little more": png_that_says(900, 900),
    "png that is large and zeros": _png_of_zeros(5000),
    "png of too many zeros": _png_of_zeros(7000),
    "png with a colour profile without end": _png_with(b"iCCP", b"a\0\0" + _zipped(bytes(200_000_000))),
    "png with a text without end": _png_with(b"zTXt", b"a\0\0" + _zipped(bytes(200_000_000))),
    "png with notes that lead nowhere": _png_with(b"eXIf", b"MM\0*\xff\xff\xff\xff" * 100),
    "gif with two sizes": _gif_in_another_size(),
    "gif of a thousand pictures": _moving("gif", 1000),
    "webp of three hundred pictures": _moving("webp", 300),
    "jpeg and html": picture("jpeg") + b"<script>alert(1)</script>",
    "pdf and png": b"%PDF-1.4\n" + picture("png"),
    "zip and png": b"PK\x03\x04" + picture("png"),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "postscript": b"%!PS-Adobe-3.0\n(/etc/passwd) run",
    "nothing": b"",
    **{f"{form} cut off": saved(_NOISE, form)[:-60] for form in PICTURES},
    **{f"{form} bent, {n}": _bent(saved(_NOISE, form), n) for form in PICTURES for n in range(3)},
}
SOUNDS: dict[str, bytes] = {
    "wav that says it never ends": b"RIFF\xff\xff\xff\xffWAVE" + sound("wav")[12:40] + b"\xff\xff\xff\xff",
    "wav without channels": sound("wav")[:22] + b"\0\0" + sound("wav")[24:],
    "wav of no rate": sound("wav")[:24] + bytes(4) + sound("wav")[28:],
    "wav of the highest rate": sound("wav")[:24] + b"\xff" * 4 + sound("wav")[28:],
    "more than half an hour": _long_silence(),
    **{f"{form} cut off": sample(form)[:60] for form in ("wav", "mp3", "flac")},
    **{f"{form} bent, {n}": _bent(sample(form), n) for form in ("wav", "mp3", "flac") for n in range(3)},
}


def _pdf(*objects: str, trailer: str = "/Root 1 0 R") -> bytes:
    data = b"%PDF-1.4\n"
    for number, one in enumerate(objects, 1):
        data += f"{number} 0 obj\n{one}\nendobj\n".encode("latin-1")
    return data + f"trailer << /Size {len(objects) + 1} {trailer} >>\nstartxref\n0\n%%EOF\n".encode()


def _pdf_that_unpacks(size: int) -> bytes:
    packed = _zipped(b"BT (a) Tj ET " * (size // 13)).decode("latin-1")
    stream = f"<< /Length {len(packed)} /Filter /FlateDecode >>\nstream\n{packed}\nendstream"
    page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>"
    return _pdf("<< /Pages 2 0 R >>", "<< /Kids [3 0 R] /Count 1 >>", page, stream)


DOCUMENTS: dict[str, bytes] = {
    "a page that is its own parent": _pdf(
        "<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [2 0 R] /Count 1 >>"
    ),
    "a billion pages": _pdf(
        "<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [] /Count 1000000000 >>"
    ),
    "too many pages": pdf("x", 1001),
    "a page without end": _pdf_that_unpacks(100_000_000),
    "a page as large as the sky": pdf("x").replace(b"[0 0 200 200]", b"[0 0 9e9 9e9]"),
    "a page as thin as a hair": pdf("x").replace(b"[0 0 200 200]", b"[0 0 1e6 1e-3]"),
    "lists in lists": _pdf("<< /Pages " + "[" * 100_000 + " >>"),
    "an index that is its own predecessor": pdf("x").replace(b"trailer <<", b"trailer << /Prev 9"),
    "an object that is itself": _pdf("1 0 R"),
    "cut off": pdf("A potter")[:-200],
}
