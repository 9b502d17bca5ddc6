"""Sandbox process that decodes clients' files and can do nothing else.

Libraries that decode images, audio and PDF files are written in C, or slow, and their input is untrusted. A
process has one kind of work (`image`, `audio`, `pdf`, `pages`), imports the library for it, and gives up
everything else before it reads a byte: no files, no processes, no memory above its limit, and limited CPU
time per file. It has one socket, which is its standard input. It ends with its server, or after some idle
time. It is run by path and imports nothing of dragoman.

A request and a reply are each a frame: two lengths, a JSON object, and bytes. A failure is `{"error": WORD}`;
error texts of libraries are not returned.
"""

import importlib
import json
import mmap
import os
import pkgutil
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

HEAD = struct.Struct(">II")
MOST_BYTES = (1 << 32) - 1
SMALL = 256 * 1024
IDLE_S = 60.0
NICE = 5
PICTURES = {
    "png": ("PngImagePlugin", "PngImageFile"),
    "jpeg": ("JpegImagePlugin", "JpegImageFile"),
    "webp": ("WebPImagePlugin", "WebPImageFile"),
    "gif": ("GifImagePlugin", "GifImageFile"),
}
SOUNDS = {"wav": ("WAV", "WAVEX"), "mp3": ("MP3", "MPEG"), "flac": ("FLAC",)}
SAMPLES = {
    "PCM_U8",
    "PCM_S8",
    "PCM_16",
    "PCM_24",
    "PCM_32",
    "FLOAT",
    "DOUBLE",
    "ULAW",
    "ALAW",
    "MPEG_LAYER_III",
}
ORIENTATION = 0x0112
PAGE_QUALITY = 90
PAGE = b"""%PDF-1.4
1 0 obj << /Type /Catalog /Pages 2 0 R >> endobj
2 0 obj << /Type /Pages /Kids [3 0 R] /Count 1 >> endobj
3 0 obj << /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources
<< /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >> endobj
4 0 obj << /Length 32 >> stream
BT /F 5 Tf 1 1 Td (\344 b) Tj ET
endstream endobj
trailer << /Size 5 /Root 1 0 R >>
startxref
0
%%EOF
"""
"""A page with one word, to exercise the library before the sandbox closes."""


class UnusableFile(Exception):
    """The file cannot be used; the message is the word for the reason."""


# The socket


def receive(
    link: socket.socket, until: float | None = None, most: int = MOST_BYTES
) -> tuple[Any, bytes | memoryview] | None:
    """Return the next frame; None at the end of the stream. Raise OSError (TimeoutError is one) if it cannot
    be read.
    """
    if (head := _take(link, HEAD.size, until)) is None:
        return None
    about, size = HEAD.unpack(head)
    if about > MOST_BYTES or size > most:
        raise OSError("a frame that is too large")
    header, data = _take(link, about, until), _take(link, size, until)
    return None if header is None or data is None else (json.loads(bytes(header)), data)


def _take(link: socket.socket, size: int, until: float | None) -> bytes | memoryview | None:
    """Read `size` bytes. A photo is 36 MB: clearing and copying that much would block all other threads,
    those of answers included, so it is received into mapped pages that the system fills, and stays there.
    """
    view = memoryview(mmap.mmap(-1, size) if size > SMALL else bytearray(size))
    at = 0
    while at < size:
        _wait(link, until)
        if not (came := link.recv_into(view[at:])):
            return None
        at += came
    return view.toreadonly() if size > SMALL else bytes(view)


def _wait(link: socket.socket, until: float | None) -> None:
    if until is not None:
        link.settimeout(max(0.001, until - time.monotonic()))


def send(link: socket.socket, message: Any, data: bytes = b"", until: float | None = None) -> None:
    about = json.dumps(message).encode()
    for part in (HEAD.pack(len(about), len(data)) + about, data):
        _wait(link, until)
        link.sendall(part)


def restrict_process(memory: int) -> None:
    """Restrict this process from here on: memory, no files, no other sockets, no processes."""
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(kind, (most, most))


def limit_cpu(seconds: int) -> None:
    """Limit CPU time for the next work; the system kills a process that takes more."""
    used = sum(os.times()[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + seconds + 1, hard))


# Images


def load_image() -> None:
    from PIL import Image, ImageFile

    for module, _ in PICTURES.values():
        importlib.import_module(f"PIL.{module}")
    # The size is checked against the request instead.
    Image.MAX_IMAGE_PIXELS = None
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    # Import everything that is imported on first use: later no file can be opened.
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for name in PICTURES:
        for mode in ("RGB", "P", "I;16") if name == "png" else ("RGB",):
            written = BytesIO()
            Image.new(mode, (2, 2)).save(written, name, exif=exif)
            for data in (written.getvalue(), written.getvalue()[:-20]):
                with suppress(Exception):
                    decode_image({"format": name, "pixels": 4}, data)


def decode_image(asked: dict[str, Any], data: bytes | memoryview) -> tuple[dict[str, Any], bytes]:
    """Decode to RGB, rows from the top and pixels from the left, with the image's orientation applied."""
    module, name = PICTURES[asked["format"]]
    image = getattr(sys.modules[f"PIL.{module}"], name)(BytesIO(data))
    if image.width * image.height > asked["pixels"]:
        raise UnusableFile("too_large")
    image.load()
    turned = _upright(_flat(image))
    return {"width": turned.width, "height": turned.height}, turned.tobytes()


def _flat(image: Any) -> Any:
    """Flatten transparent images onto white."""
    from PIL import Image

    if image.mode.startswith("I"):
        # 16-bit grey; the library converts all other modes to 8 bits itself.
        image = image.point(lambda value: value / 257).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        seen = image.convert("RGBA")
        flat = Image.new("RGB", seen.size, "white")
        flat.paste(seen, mask=seen.getchannel("A"))
    else:
        flat = image.convert("RGB")
    flat.info["orientation"] = _orientation(image)
    return flat


def _orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        # Damaged EXIF data leaves the image unchanged.
        return 1


def _upright(image: Any) -> Any:
    from PIL.Image import Transpose

    turns = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )
    at = image.info["orientation"] - 2
    return image.transpose(turns[at]) if 0 <= at < len(turns) else image


# Audio


def load_audio() -> None:
    import numpy
    import soundfile

    # As for images: everything is used once.
    tone = BytesIO()
    soundfile.write(tone, numpy.zeros(64, "float32"), 8000, format="FLAC")
    tone.seek(0)
    with soundfile.SoundFile(tone) as file:
        file.read(64, dtype="float32", always_2d=True)
    _Resampler(8000, 16000).feed(numpy.zeros(40_000, "float32"))


def decode_audio(asked: dict[str, Any], data: bytes | memoryview) -> tuple[dict[str, Any], bytes]:
    """Decode to mono at the requested rate, as 32-bit floats."""
    import soundfile

    with soundfile.SoundFile(BytesIO(data)) as file:
        if file.format not in SOUNDS[asked["format"]] or file.subtype not in SAMPLES:
            raise UnusableFile("unreadable")
        left = most = int(asked["seconds"] * file.samplerate + 1)
        if most * file.channels > asked["samples"]:
            raise UnusableFile("too_large")
        resampler = _Resampler(file.samplerate, asked["rate"])
        while left and len(block := file.read(min(left, file.samplerate), dtype="float32", always_2d=True)):
            left -= len(block)
            resampler.feed(block.mean(axis=1))
    heard = resampler.end()
    if not len(heard):
        raise UnusableFile("unreadable")
    return {}, heard.astype("<f4").tobytes()


class _Resampler:
    """Resampler by way of the spectrum: four seconds at a time, of which the middle two are kept.

    Four seconds are a whole number of samples at every rate. Wrap-around at their ends does not reach the
    middle, because the spectrum ends softly.
    """

    def __init__(self, rate: int, wanted: int) -> None:
        import numpy

        self._rate, self._wanted = rate, wanted
        self._came = 0
        self._waiting = numpy.zeros(rate, "float32")
        self._made: list[Any] = []
        kept = 2 * min(rate, wanted) + 1
        soft = max(1, kept // 25)
        self._soft = numpy.ones(kept, "float32")
        self._soft[-soft:] = 0.5 + 0.5 * numpy.cos(numpy.linspace(0, numpy.pi, soft, dtype="float32"))

    def feed(self, samples: Any) -> None:
        import numpy

        self._came += len(samples)
        if self._rate == self._wanted:
            self._made.append(samples)
            return
        self._waiting = numpy.concatenate((self._waiting, samples))
        while len(self._waiting) >= 4 * self._rate:
            spectrum = numpy.fft.rfft(self._waiting[: 4 * self._rate])[: len(self._soft)] * self._soft
            resampled = numpy.fft.irfft(spectrum, 4 * self._wanted) * (self._wanted / self._rate)
            self._made.append(resampled[self._wanted : 3 * self._wanted].astype("float32"))
            self._waiting = self._waiting[2 * self._rate :]

    def end(self) -> Any:
        import numpy

        length = round(self._came * self._wanted / self._rate)
        self.feed(numpy.zeros(4 * self._rate, "float32"))
        return numpy.concatenate(self._made)[:length]


# PDF files: their text with a Python library and, for models that take images, their pages with a renderer


def load_pdf() -> None:
    import pypdf

    # Later no file can be opened: import all modules now and use everything once.
    for module in pkgutil.walk_packages(pypdf.__path__, "pypdf."):
        with suppress(ImportError):
            importlib.import_module(module.name)
    asked = {"pages": 1, "chars": 1, "pictures": 0}
    for data in (PAGE, PAGE[:-40], b"%PDF-"):
        with suppress(Exception):
            read_pdf(asked, data)


def load_pages() -> None:
    import PIL.JpegImagePlugin  # noqa: F401
    import pypdfium2  # noqa: F401

    load_pdf()
    _draw(PAGE, 16, 1 << 20)


def read_pdf(asked: dict[str, Any], data: bytes | memoryview) -> tuple[dict[str, Any], bytes]:
    from pypdf import PdfReader

    reader = PdfReader(BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnusableFile("encrypted")
    if len(reader.pages) > asked["pages"]:
        raise UnusableFile("too_many_pages")
    texts: list[str] = []
    for page in reader.pages:
        texts.append(page.extract_text())
        if sum(map(len, texts)) > asked["chars"]:
            raise UnusableFile("too_much_text")
    shown = len(texts) <= asked["pictures"]
    drawn = _draw(bytes(data), asked["side"], asked["bytes"]) if shown else []
    return {"texts": texts, "sizes": [len(page) for page in drawn]}, b"".join(drawn)


def _draw(data: bytes, side: int, most_bytes: int) -> list[bytes]:
    import pypdfium2

    drawn: list[bytes] = []
    document = pypdfium2.PdfDocument(data)
    for page in document:
        scale = side / max(*page.get_size(), 1.0)
        written = BytesIO()
        page.render(scale=scale).to_pil().convert("RGB").save(written, "JPEG", quality=PAGE_QUALITY)
        page.close()
        drawn.append(written.getvalue())
        if sum(map(len, drawn)) > most_bytes:
            raise UnusableFile("too_large")
    return drawn


WORK: dict[
    str,
    tuple[Callable[[], None], Callable[[dict[str, Any], bytes | memoryview], tuple[dict[str, Any], bytes]]],
] = {
    "image": (load_image, decode_image),
    "audio": (load_audio, decode_audio),
    "pdf": (load_pdf, read_pdf),
    "pages": (load_pages, read_pdf),
}


def answer(link: socket.socket, work: str, memory: int) -> None:
    load, do = WORK[work]
    missing = False
    # Decoding clients' files has lower priority than the server's threads, which write answers.
    os.nice(NICE)
    try:
        load()
    except ImportError:
        missing = True
    restrict_process(memory)
    link.settimeout(IDLE_S)
    while (frame := receive(link)) is not None:
        asked, data = frame
        limit_cpu(asked["cpu"])
        link.settimeout(None)
        try:
            reply = ({"error": "missing"}, b"") if missing else do(asked, data)
        except UnusableFile as unfit:
            reply = {"error": str(unfit)}, b""
        except Exception:
            # Error texts of libraries are not returned.
            reply = {"error": "unreadable"}, b""
        send(link, *reply)
        link.settimeout(IDLE_S)


if __name__ == "__main__":
    try:
        answer(socket.socket(fileno=0), sys.argv[1], int(sys.argv[2]))
    except OSError:
        # Idle for too long, or the server is gone.
        os._exit(0)
