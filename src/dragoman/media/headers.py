"""Image and audio headers: format and dimensions from the first bytes, without decoding.

A file's content decides what it is, never its name or its sender: `read_media` detects the format by the
first bytes and reads the dimensions from the header, with a few lines per format below. They are checked
against the limits before anything is allocated for the file. A decoder gets the format detected here and may
use no other, so a file that is valid in two formats is read as one of them.

The header may be wrong. Decoders check the dimensions again.
"""

import hashlib
import struct
from base64 import b64encode
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count
from dragoman.media import Media, MediaKind

Measures: TypeAlias = tuple[int, int, float]
"""Width, height and seconds."""
KINDS: dict[str, MediaKind] = {
    **dict.fromkeys(("png", "jpeg", "webp", "gif"), "image"),
    **dict.fromkeys(("wav", "mp3", "flac"), "audio"),
}
MEDIA_TYPES = {"mp3": "audio/mpeg"} | {
    name: f"{kind}/{name}" for name, kind in KINDS.items() if name != "mp3"
}
WORDS: dict[MediaKind, tuple[str, str]] = {
    "image": ("an image", "PNG, JPEG, WebP or GIF"),
    "audio": ("an audio file", "WAV, MP3 or FLAC"),
}
LONGEST_SIDE = 65_535
MOST_RATE, MOST_CHANNELS = 192_000, 8
SAMPLES_A_SECOND = 96_000
"""Maximum number of samples per second of all channels together, on average over the longest allowed audio:
the bound on the cost of decoding.
"""
MOST_SCANS = 256
"""Maximum number of scans in a JPEG: each is a pass over the whole image."""
MOST_BLOCKS = 4096
"""Maximum number of blocks that are read in a header."""


class InvalidMedia(Exception):
    """A problem of a file, described for the client."""

    def __init__(self, message: str, code: str = "unsupported_content") -> None:
        super().__init__(message)
        self.code = code


def data_url(media: Media) -> str:
    return f"data:{MEDIA_TYPES[media.format]};base64,{b64encode(media.data).decode()}"


def mention(media: Media) -> str:
    """Describe media that a model does not get: `[image image/png, 3 KiB]`."""
    return f"[{media.kind} {MEDIA_TYPES[media.format]}, {max(1, len(media.data) // 1024)} KiB]"


def read_media(data: bytes, kind: MediaKind, limits: Limits, param: str, detail: str = "auto") -> Media:
    """Read the media in a file's bytes, or raise a BadRequest for the field `place`."""
    try:
        if len(data) > limits.media_bytes:
            reason = f"the file has {len(data)} bytes; at most {limits.media_bytes} are allowed"
            raise InvalidMedia(f"{reason}.", "limit_exceeded")
        name = find_format(data, kind)
        width, height, seconds = READERS[name](data, limits)
        _check_measures(width, height, seconds, limits)
    except InvalidMedia as error:
        raise BadRequest(f"'{param}': {error}", param=param, code=error.code) from None
    digest = hashlib.sha256(data).hexdigest()
    return Media(
        kind=kind,
        format=name,
        data=data,
        digest=digest,
        width=width,
        height=height,
        seconds=seconds,
        detail=detail,
    )


def check_media(medias: Collection[Media], limits: Limits, param: str) -> None:
    """Check all media of a request together, also referenced ones; `place` is their field."""
    check_count(len(medias), limits.media_files, param, "images and audio files")
    size = sum(len(media.data) for media in medias)
    if size > (most := limits.media_total_bytes):
        message = (
            f"'{param}': the images and audio files of a request have {size} bytes together; at most {most} "
            "are allowed."
        )
        raise BadRequest(message, param=param, code="limit_exceeded")


def _check_measures(width: int, height: int, seconds: float, limits: Limits) -> None:
    if width * height > limits.media_pixels:
        reason = f"the image has {width} × {height} pixels; at most {limits.media_pixels} are allowed"
        raise InvalidMedia(f"{reason}.", "limit_exceeded")
    if max(width, height) > LONGEST_SIDE:
        reason = f"the image is {max(width, height)} pixels long; at most {LONGEST_SIDE} are allowed"
        raise InvalidMedia(f"{reason}.", "limit_exceeded")
    if seconds > limits.media_seconds:
        raise InvalidMedia(_too_long(limits), "limit_exceeded")


def _too_long(limits: Limits) -> str:
    return f"the audio is longer than {limits.media_seconds} seconds; shorten it."


# Format detection

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
FOREIGN: tuple[tuple[int, bytes, str], ...] = (
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"%PDF-", "PDF"),
    (0, b"OggS", "Ogg"),
    (0, b"FORM", "AIFF"),
    (0, b"\x1a\x45\xdf\xa3", "WebM"),
    (0, b"#!AMR", "AMR"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "PSD"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (4, b"ftyphe", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftypmsf1", "HEIC"),
    (4, b"ftypavi", "AVIF"),
    (4, b"ftypM4A", "M4A"),
    (4, b"ftyp", "MP4"),
    (0, b"\xff\xf1", "AAC"),
    (0, b"\xff\xf9", "AAC"),
    (0, b"RF64", "RF64"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
)
"""Formats that clients send and that are not supported, for the error message."""


def find_format(data: bytes, kind: MediaKind | None = None) -> str:
    """Detect the format by the first bytes, such as `png`. Raise InvalidMedia if it is unsupported or of
    another kind.
    """
    what, formats = WORDS[kind or "image"]
    if not data:
        raise InvalidMedia(f"the file is empty; send {what} as {formats}.", "invalid_value")
    text = _own_format(data)
    if text is None:
        name = _foreign_format(data)
        reason = f"{name} is not supported" if name else f"this is not {what} in a supported format"
        raise InvalidMedia(f"{reason}; send {formats}.")
    if kind is not None and KINDS[text] != kind:
        raise InvalidMedia(f"this is {WORDS[KINDS[text]][0]} ({text}), not {what}; send {formats}.")
    return text


def _own_format(data: bytes) -> str | None:
    if data.startswith(PNG):
        return "png"
    if data.startswith(JPEG):
        return "jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"RIFF"):
        return {b"WEBP": "webp", b"WAVE": "wav"}.get(data[8:12])
    if data[(start := _tags_end(data)) : start + 4] == b"fLaC":
        return "flac"
    # ID3 tags come before MP3 data; what follows them is checked when frames are read.
    return "mp3" if start or _mp3_frame(data, 0) is not None else None


def _foreign_format(data: bytes) -> str | None:
    for at, magic, name in FOREIGN:
        if data.startswith(magic, at):
            return name
    beginning = data[:1024].lower()
    return "SVG" if b"<svg" in beginning else None


# Dimensions by format. A truncated header raises InvalidMedia as well: `_take` has no other way to fail.


def _take(data: bytes, at: int, form: str) -> tuple[Any, ...]:
    if at < 0 or at + struct.calcsize(form) > len(data):
        raise InvalidMedia("the file is truncated in its header; send all of it.", "invalid_value")
    return struct.unpack_from(form, data, at)


def _damaged(what: str) -> InvalidMedia:
    return InvalidMedia(f"the header of this {what} file is damaged; save it again.", "invalid_value")


def _picture(width: int, height: int, what: str) -> Measures:
    if width < 1 or height < 1:
        raise _damaged(what)
    return width, height, 0.0


def _measure_png(data: bytes, _: Limits) -> Measures:
    length, name, width, height, depth, colour = _take(data, 8, ">I4sIIBB")
    if (length, name) != (13, b"IHDR") or depth not in (1, 2, 4, 8, 16) or colour not in (0, 2, 3, 4, 6):
        raise _damaged("PNG")
    return _picture(width, height, "PNG")


def _measure_jpeg(data: bytes, _: Limits) -> Measures:
    """Read the only frame header that is allowed before the first scan."""
    frame: Measures | None = None
    at = 2
    for _block in range(MOST_BLOCKS):
        before, marker = _take(data, at, "BB")
        if before != 0xFF:
            raise _damaged("JPEG")
        if marker == 0xFF:
            at += 1
            continue
        (length,) = _take(data, at + 2, ">H")
        if marker == 0xDA and frame is not None:
            _check_scans(data)
            return frame
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if frame is not None:
                raise _damaged("JPEG")
            frame = _jpeg_frame(data, at + 4, marker)
        if length < 2 or marker in (0x00, 0x01, 0xDA) or 0xD0 <= marker <= 0xD9:
            raise _damaged("JPEG")
        at += 2 + length
    raise _damaged("JPEG")


def _jpeg_frame(data: bytes, at: int, marker: int) -> Measures:
    precision, height, width, components = _take(data, at, ">BHHB")
    if marker > 0xC2 or precision != 8 or components not in (1, 3, 4):
        raise InvalidMedia(
            "this kind of JPEG (lossless, arithmetic or over 8 bits) is not supported; save it as baseline "
            "JPEG."
        )
    return _picture(width, height, "JPEG")


def _check_scans(data: bytes) -> None:
    if data.count(b"\xff\xda") > MOST_SCANS:
        raise InvalidMedia(
            f"the JPEG file has more than {MOST_SCANS} scans; save it again.", "limit_exceeded"
        )


def _measure_gif(data: bytes, _: Limits) -> Measures:
    """Read the screen size and the first image: decoders make the screen as large as both."""
    width, height, flags, _background, _aspect = _take(data, 6, "<HHBBB")
    at = 13 + _colours(flags)
    for _block in range(MOST_BLOCKS):
        (kind,) = _take(data, at, "B")
        if kind == 0x2C:
            left, top, wide, high, _flags = _take(data, at + 1, "<HHHHB")
            _picture(wide, high, "GIF")
            return _picture(max(width, left + wide), max(height, top + high), "GIF")
        if kind != 0x21:
            raise _damaged("GIF")
        at = _blocks_end(data, at + 2)
    raise _damaged("GIF")


def _colours(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _blocks_end(data: bytes, at: int) -> int:
    for _block in range(MOST_BLOCKS):
        (size,) = _take(data, at, "B")
        at += 1 + size
        if not size:
            return at
    raise _damaged("GIF")


def _measure_webp(data: bytes, _: Limits) -> Measures:
    size, _webp, name, length = _take(data, 4, "<I4s4sI")
    if size + 8 > len(data):
        raise InvalidMedia("the WebP file is truncated; send all of it.", "invalid_value")
    if name == b"VP8X" and length >= 10:
        _flags, wide, high, wide_top, high_top = _webp_canvas(data)
        return _picture(1 + wide + (wide_top << 16), 1 + high + (high_top << 16), "WebP")
    if name == b"VP8L":
        signature, bits = _take(data, 20, "<BI")
        if signature == 0x2F:
            return _picture(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), "WebP")
    if name == b"VP8 ":
        tag, _more, code, width, height = _take(data, 20, "<BH3sHH")
        if not tag & 1 and code == b"\x9d\x01\x2a":
            return _picture(width & 0x3FFF, height & 0x3FFF, "WebP")
    raise _damaged("WebP")


def _webp_canvas(data: bytes) -> tuple[Any, ...]:
    flags, wide, wide_top, high, high_top = _take(data, 20, "<IHBHB")
    return flags, wide, high, wide_top, high_top


def _sound(frames: int, rate: int, channels: int, limits: Limits) -> Measures:
    if not 1 <= rate <= MOST_RATE or not 1 <= channels <= MOST_CHANNELS:
        most = f"{MOST_RATE} samples per second and {MOST_CHANNELS} channels"
        raise InvalidMedia(
            f"the audio has {rate} samples per second in {channels} channels; at most {most} are allowed."
        )
    if frames < 1:
        raise InvalidMedia("the file has no audio; send another.", "invalid_value")
    if frames * channels > limits.media_seconds * SAMPLES_A_SECOND:
        raise InvalidMedia(_too_long(limits), "limit_exceeded")
    return 0, 0, frames / rate


WAV_CODES = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
"""PCM, float, A-law and µ-law, with the bits per sample that each may have."""
EXTENSIBLE = 0xFFFE
UNKNOWN = 0x7FFF_0000
"""Sizes from here on occur in files that were written to a pipe."""


def _measure_wav(data: bytes, limits: Limits) -> Measures:
    rate = channels = block = 0
    at = 12
    for _chunk in range(MOST_BLOCKS):
        name, length = _take(data, at, "<4sI")
        at += 8
        if name == b"fmt ":
            channels, rate, block = _wav_form(data, at, length)
        if name == b"data":
            left = len(data) - at
            if left < length < UNKNOWN:
                raise InvalidMedia("the WAV file is truncated; send all of it.", "invalid_value")
            if not block:
                raise _damaged("WAV")
            return _sound((min(length, left) or left) // block, rate, channels, limits)
        at += length + length % 2
    raise _damaged("WAV")


def _wav_form(data: bytes, at: int, length: int) -> tuple[int, int, int]:
    code, channels, rate, _bytes, block, bits = _take(data, at, "<HHIIHH")
    if code == EXTENSIBLE and length >= 40:
        (code,) = _take(data, at + 24, "<H")
    if bits not in WAV_CODES.get(code, ()):
        raise InvalidMedia("this kind of WAV is not supported; send PCM samples.")
    if block != channels * bits // 8 or length < 16:
        raise _damaged("WAV")
    return channels, rate, block


def _measure_flac(data: bytes, limits: Limits) -> Measures:
    kind, length_top, length, _blocks, _sizes, packed = _take(data, _tags_end(data) + 4, ">BBHI6sQ")
    if kind & 0x7F or (length_top << 16) + length != 34:
        raise _damaged("FLAC")
    frames = packed & 0xF_FFFF_FFFF
    if not frames:
        message = "the FLAC file does not state its length; write it to a file, not to a pipe."
        raise InvalidMedia(message, "invalid_value")
    return _sound(frames, packed >> 44, (packed >> 41 & 7) + 1, limits)


# MP3 has no header for the whole file: its length is the sum of its frames, which are read one by one up to
# the limit. A decoder may find more after the point where this stops, and does not use it.

RATES = ((11_025, 12_000, 8_000), (), (22_050, 24_000, 16_000), (44_100, 48_000, 32_000))
"""Sampling rates of MPEG 2.5, a reserved value, MPEG 2 and MPEG 1."""
BITRATES_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
BITRATES_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


def _measure_mp3(data: bytes, limits: Limits) -> Measures:
    start = _tags_end(data)
    first = _mp3_frame(data, start)
    if first is None:
        raise InvalidMedia("the file has no MP3 frame where its audio should begin; save it again.")
    rate, channels, samples, size = first
    at, frames = start + size, samples
    if at < len(data) and _mp3_frame(data, at) is None and data[at : at + 3] != b"TAG":
        raise InvalidMedia("this is not a supported audio file; send WAV, MP3 or FLAC.")
    while (frame := _mp3_frame(data, at)) is not None and frame[0] == rate:
        frames += samples
        at += frame[3]
        if frames > limits.media_seconds * rate:
            raise InvalidMedia(_too_long(limits), "limit_exceeded")
    return _sound(frames, rate, channels, limits)


def _mp3_frame(data: bytes, at: int) -> tuple[int, int, int, int] | None:
    """Return rate, channels, samples and bytes of the frame at this offset, or None."""
    if at + 4 > len(data):
        return None
    head = int.from_bytes(data[at : at + 4], "big")
    version, layer, bitrate, rate = head >> 19 & 3, head >> 17 & 3, head >> 12 & 15, head >> 10 & 3
    if head >> 21 != 0x7FF or layer != 1 or version == 1 or bitrate in (0, 15) or rate == 3:
        return None
    a_second = RATES[version][rate]
    samples, bitrates = (1152, BITRATES_1) if version == 3 else (576, BITRATES_2)
    size = samples // 8 * bitrates[bitrate] * 1000 // a_second + (head >> 9 & 1)
    return a_second, 1 if head >> 6 & 3 == 3 else 2, samples, size


def _tags_end(data: bytes) -> int:
    """Return the offset after leading ID3 tags: `ID3`, version, flags, and a size of 4 times 7 bits."""
    at = 0
    for _tag in range(8):
        head = data[at : at + 10]
        if len(head) < 10 or not head.startswith(b"ID3") or max(head[6:]) > 0x7F:
            break
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        at += 10 + size + (10 if head[5] & 0x10 else 0)
    return at


READERS: dict[str, Callable[[bytes, Limits], Measures]] = {
    "png": _measure_png,
    "jpeg": _measure_jpeg,
    "gif": _measure_gif,
    "webp": _measure_webp,
    "wav": _measure_wav,
    "mp3": _measure_mp3,
    "flac": _measure_flac,
}
