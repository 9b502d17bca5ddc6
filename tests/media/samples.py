"""Pictures and sounds for tests: real files, made by the libraries that people make them with."""

import io
import struct
import wave
import zlib
from functools import cache
from typing import Any

import numpy
import soundfile
from PIL import Image

PICTURES = ("png", "jpeg", "webp", "gif")
SOUNDS = ("wav", "mp3", "flac")


@cache
def picture(form: str, width: int = 6, height: int = 4, colour: str = "red", **how: Any) -> bytes:
    return saved(Image.new("RGB", (width, height), colour), form, **how)


def saved(image: Image.Image, form: str, **how: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **how)
    return written.getvalue()


@cache
def sound(form: str, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> bytes:
    """A tone of 440 Hz, as loud in every channel."""
    at = numpy.arange(int(seconds * rate)) / rate
    tone = 0.5 * numpy.sin(2 * numpy.pi * 440 * at)
    written = io.BytesIO()
    soundfile.write(written, numpy.stack([tone] * channels, axis=1), rate, format=form.upper())
    return written.getvalue()


def silence(seconds: float, rate: int = 8_000) -> bytes:
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * int(seconds * rate)))
    return written.getvalue()


def sample(form: str) -> bytes:
    return picture(form) if form in PICTURES else sound(form)


def png_that_says(width: int, height: int) -> bytes:
    """Few bytes that claim to be a picture of this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
