"""What a file is, by its own bytes, and what is refused before anything decodes it."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.media import MediaKind
from dragoman.media.headers import KINDS, check_media, read_media
from tests.media.samples import PICTURES, SOUNDS, picture, png_that_says, sample, silence, sound
from tests.support.laws import examples

LIMITS = Limits()
AUDIO: MediaKind = "audio"
BEGINNINGS = [sample(name) for name in KINDS] + [
    b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0",
    b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0",
    b"ID3\4\0\0\0\0\0\4abcd",
    b"\xff\xfb\x90\0",
]


def refused(data: bytes, kind: MediaKind = "image", limits: Limits = LIMITS) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_media(data, kind, limits, "messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.message.startswith("'messages[0].content[1]': ")
    return caught.value


@pytest.mark.parametrize("form", PICTURES)
def test_a_picture_has_the_measures_of_its_header(form: str) -> None:
    data = picture(form, 6, 4)
    media = read_media(data, "image", LIMITS, "x", "low")
    assert (media.format, media.width, media.height, media.detail) == (form, 6, 4, "low")
    assert media.digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "data",
    [
        picture("webp", 9, 7, lossless=True),
        picture("webp", 9, 7, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"),
        picture("jpeg", 9, 7, progressive=True),
    ],
    ids=["webp lossless", "webp extended", "jpeg progressive"],
)
def test_every_kind_of_a_format_is_measured(data: bytes) -> None:
    media = read_media(data, "image", LIMITS, "x")
    assert (media.width, media.height) == (9, 7)


@pytest.mark.parametrize("form", SOUNDS)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_has_the_seconds_of_its_header(form: str, channels: int) -> None:
    media = read_media(sound(form, 1.5, 16_000, channels), "audio", LIMITS, "x")
    assert media.format == form
    # An MP3 has whole frames, and some at its beginning for the decoder.
    assert media.seconds == pytest.approx(1.5, abs=0.15 if form == "mp3" else 0.001)


def test_tags_before_a_sound_are_passed_over() -> None:
    plain = sound("mp3")
    media = read_media(b"ID3\4\0\0\0\0\2\0" + bytes(256) + plain, "audio", LIMITS, "x")
    assert media.seconds == read_media(plain, "audio", LIMITS, "x").seconds


def test_a_sound_out_of_a_pipe_is_as_long_as_its_bytes() -> None:
    piped = bytearray(silence(1.0))
    piped[40:44] = b"\xff\xff\xff\xff"
    assert read_media(bytes(piped), "audio", LIMITS, "x").seconds == 1.0


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"BM" + bytes(60), "BMP"),
        (b"II*\0" + bytes(60), "TIFF"),
        (b"MM\0*" + bytes(60), "TIFF"),
        (b"\0\0\0\x18ftypheic" + bytes(60), "HEIC"),
        (b"\0\0\0\x18ftypavif" + bytes(60), "AVIF"),
        (b"%PDF-1.7\n", "PDF"),
        (b"", "empty"),
        (b"hello", "not an image"),
        (sound("wav"), "an audio file"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, word: str) -> None:
    error = refused(data)
    assert word in error.message and "PNG, JPEG, WebP or GIF" in error.message


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"OggS" + bytes(60), "Ogg"),
        (b"\0\0\0\x18ftypM4A " + bytes(60), "M4A"),
        (b"\xff\xf1\x50\x80" + bytes(60), "AAC"),
        (picture("png"), "an image"),
        (b"", "empty"),
    ],
)
def test_what_is_no_sound_is_named(data: bytes, word: str) -> None:
    error = refused(data, "audio")
    assert word in error.message and "WAV, MP3 or FLAC" in error.message


@pytest.mark.parametrize("form", list(KINDS))
def test_a_header_that_is_cut_off_is_refused(form: str) -> None:
    data = sample(form)
    for end in range(1, 13 if KINDS[form] == "image" else 4):
        refused(data[:end], KINDS[form])


def test_a_wav_without_its_end_is_refused() -> None:
    assert "truncated" in refused(sound("wav")[:-100], "audio").message


def test_a_picture_of_too_many_pixels_is_refused_by_its_header() -> None:
    error = refused(png_that_says(50_000, 50_000))
    assert error.code == "limit_exceeded" and "50000 × 50000" in error.message


def test_a_picture_without_an_extent_is_refused() -> None:
    assert "damaged" in refused(png_that_says(0, 5)).message


def test_a_jpeg_with_two_sizes_is_refused() -> None:
    data = picture("jpeg")
    at = data.index(b"\xff\xc0")
    length = struct.unpack_from(">H", data, at + 2)[0]
    frame = data[at : at + 2 + length]
    assert "damaged" in refused(data[:at] + frame + data[at:]).message


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    assert "scans" in refused(picture("jpeg") + b"\xff\xda\0\2" * 300).message


def test_a_gif_is_as_large_as_its_first_picture_too() -> None:
    data = bytearray(picture("gif", 6, 4))
    data[6:10] = struct.pack("<HH", 1, 1)
    media = read_media(bytes(data), "image", LIMITS, "x")
    assert (media.width, media.height) == (6, 4)


@pytest.mark.parametrize("form", SOUNDS)
def test_a_sound_that_is_too_long_is_refused(form: str) -> None:
    error = refused(sound(form, 2.0), "audio", Limits(media_seconds=1))
    assert error.code == "limit_exceeded" and "longer than 1 seconds" in error.message


def test_a_flac_of_more_samples_than_seconds_tell_is_refused() -> None:
    """One second of 8 channels at the highest rate there is costs as much as sixteen of others."""
    data = bytearray(sound("flac"))
    data[18:26] = (192_000 << 44 | 7 << 41 | 15 << 36 | 192_000).to_bytes(8, "big")
    assert refused(bytes(data), "audio", Limits(media_seconds=1)).code == "limit_exceeded"


def test_a_flac_that_hides_its_length_is_refused() -> None:
    data = bytearray(sound("flac"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert "does not state its length" in refused(bytes(data), "audio").message


def test_a_file_of_too_many_bytes_is_refused() -> None:
    assert refused(picture("png"), limits=Limits(media_bytes=20)).code == "limit_exceeded"


def test_a_file_that_is_two_things_is_the_first_of_them() -> None:
    media = read_media(picture("png") + b"PK\3\4" + b"<script>", "image", LIMITS, "x")
    assert media.format == "png"


def test_all_of_a_request_have_limits_together() -> None:
    media = read_media(picture("png"), "image", LIMITS, "x")
    check_media([media] * 3, LIMITS, "messages")
    with pytest.raises(BadRequest, match="At most 2 images and audio files"):
        check_media([media] * 3, Limits(media_files=2), "messages")
    with pytest.raises(BadRequest, match="bytes together"):
        check_media([media] * 3, Limits(media_total_bytes=2 * len(media.data)), "messages")


@examples(300)
@given(
    start=st.sampled_from(BEGINNINGS),
    end=st.integers(0, 200),
    changes=st.lists(st.tuples(st.integers(0, 120), st.binary(min_size=1, max_size=6)), max_size=4),
    tail=st.binary(max_size=64),
    kind=st.sampled_from(["image", "audio"]),
)
def test_any_bytes_are_read_or_refused(
    start: bytes, end: int, changes: list[tuple[int, bytes]], tail: bytes, kind: MediaKind
) -> None:
    data = bytearray(start[:end] if end < 150 else start)
    for at, written in changes:
        data[at : at + len(written)] = written
    try:
        media = read_media(bytes(data) + tail, kind, LIMITS, "x")
    except BadRequest:
        return
    assert media.kind == kind
    assert media.width * media.height > 0 or media.seconds > 0
    assert media.width * media.height <= LIMITS.media_pixels and media.seconds <= LIMITS.media_seconds


def test_what_is_written_of_a_picture_has_none_of_its_data() -> None:
    media = read_media(picture("png"), "image", Limits(), "here")
    assert repr(media) == f"Media('image', 'png', {len(media.data)} bytes, '{media.digest[:16]}')"
