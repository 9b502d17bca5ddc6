"""Files are decoded by processes that can do nothing else, and that may die."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.media import Media, decode
from dragoman.media.decode import CHILD, DecodeFailure, MediaDecoder, SandboxProcess, run_once
from dragoman.media.headers import read_media
from tests.media.samples import PICTURES, SOUNDS, picture, saved, sound

LIMITS = Limits()
ANSWERS = """
import socket, sys
sys.path.insert(0, {folder!r})
from sandbox import receive, send
link = socket.socket(fileno=0)
while (frame := receive(link)) is not None:
    {does}
"""


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    with MediaDecoder() as media_decoder:
        yield media_decoder


def image(data: bytes) -> Media:
    return read_media(data, "image", LIMITS, "x")


def audio(data: bytes) -> Media:
    return read_media(data, "audio", LIMITS, "x")


def colour_at(decoder: MediaDecoder, data: bytes, x: int = 0, y: int = 0) -> tuple[int, ...]:
    pixels = decoder.decode_image(image(data))
    at = 3 * (y * pixels.width + x)
    return tuple(pixels.rgb[at : at + 3])


def refusal(decoder: MediaDecoder, media: Media) -> str:
    with pytest.raises(BadRequest) as caught:
        decoder.decode_image(media) if media.kind == "image" else decoder.decode_audio(media, 16_000)
    return caught.value.message


def children_of(decoder: MediaDecoder) -> list[int]:
    return [child._process.pid for _, child in decoder._idle]


class Unruly(MediaDecoder):
    """The first processes are others than they should be."""

    def __init__(self, *does: str) -> None:
        super().__init__()
        self.does = list(does)

    def _start(self, work: str) -> SandboxProcess:
        if not self.does:
            return super()._start(work)
        return SandboxProcess("-c", ANSWERS.format(folder=str(CHILD.parent), does=self.does.pop(0)))


@pytest.mark.parametrize("form", PICTURES)
def test_a_picture_becomes_pixels(decoder: MediaDecoder, form: str) -> None:
    pixels = decoder.decode_image(image(picture(form, 6, 4, "blue")))
    assert (pixels.width, pixels.height, len(pixels.rgb)) == (6, 4, 72)
    assert all(abs(a - b) < 3 for a, b in zip(pixels.rgb[:3], (0, 0, 255), strict=True))


@pytest.mark.parametrize("form", ["png", "webp", "gif"])
def test_what_can_be_seen_through_is_over_white(decoder: MediaDecoder, form: str) -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert colour_at(decoder, saved(clear, form)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["png", "webp", "gif"])
def test_of_moving_pictures_the_first_is_taken(decoder: MediaDecoder, form: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime")]
    how: dict[str, Any] = {"lossless": True} if form == "webp" else {}
    moving = saved(frames[0], form, save_all=True, append_images=frames[1:], duration=50, **how)
    assert colour_at(decoder, moving) == (255, 0, 0)


def test_a_picture_is_turned_as_its_notes_say(decoder: MediaDecoder) -> None:
    notes = Image.Exif()
    notes[0x0112] = 6
    drawn = Image.new("RGB", (8, 4), "white")
    drawn.paste("black", (0, 0, 2, 2))
    pixels = decoder.decode_image(image(saved(drawn, "png", exif=notes)))
    assert (pixels.width, pixels.height) == (4, 8)
    assert pixels.rgb[9:12] == b"\0\0\0" and pixels.rgb[:3] == b"\xff\xff\xff"


def test_grey_of_16_bits_and_four_inks_are_seen(decoder: MediaDecoder) -> None:
    grey = Image.new("I;16", (4, 4), 0x8080)
    assert colour_at(decoder, saved(grey, "png")) == (128, 128, 128)
    ink = Image.new("CMYK", (8, 8), (0, 0, 0, 255))
    assert max(colour_at(decoder, saved(ink, "jpeg"))) < 8


@pytest.mark.parametrize("form", SOUNDS)
@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
def test_a_sound_becomes_samples_at_another_rate(decoder: MediaDecoder, form: str, rate: int) -> None:
    samples = decoder.decode_audio(audio(sound(form, 2.5, rate, 2)), 16_000)
    heard = numpy.frombuffer(samples.data, "<f4")
    assert len(heard) == pytest.approx(2.5 * 16_000, abs=3_000)
    middle = heard[8_000:24_000]
    assert numpy.abs(middle).max() == pytest.approx(0.5, abs=0.1)
    assert numpy.abs(numpy.fft.rfft(middle)).argmax() == 440


def test_samples_at_another_rate_are_those_of_the_same_sound(decoder: MediaDecoder) -> None:
    heard = numpy.frombuffer(decoder.decode_audio(audio(sound("wav", 6.3, 11_025)), 16_000).data, "<f4")
    tone = 0.5 * numpy.sin(2 * numpy.pi * 440 * numpy.arange(len(heard)) / 16_000)
    assert numpy.abs(heard - tone)[500:-500].max() < 0.001


@pytest.mark.parametrize("form", PICTURES)
def test_a_picture_that_is_cut_off_is_refused(decoder: MediaDecoder, form: str) -> None:
    whole = saved(Image.effect_noise((64, 64), 90).convert("RGB"), form)
    media = image(whole)
    cut = Media(**{**{name: getattr(media, name) for name in media.__struct_fields__}, "data": whole[:-900]})
    message = refusal(decoder, cut)
    assert message == f"The image ({form}, 64 × 64) cannot be decoded: {decode.DAMAGED}."


def test_a_header_that_lied_is_refused_by_what_is_found(decoder: MediaDecoder) -> None:
    media = image(picture("png", 20, 20))
    fields = {name: getattr(media, name) for name in media.__struct_fields__}
    assert "larger than its header" in refusal(decoder, Media(**{**fields, "width": 5}))


def test_a_file_of_another_kind_reaches_no_other_decoder(decoder: MediaDecoder) -> None:
    """Only the one that its first bytes name is asked, whatever else the file may be."""
    media = image(picture("png"))
    fields = {name: getattr(media, name) for name in media.__struct_fields__}
    assert "damaged" in refusal(decoder, Media(**{**fields, "format": "gif"}))


def test_a_sound_is_no_longer_than_it_said(decoder: MediaDecoder) -> None:
    media = audio(sound("flac", 2.0))
    fields = {name: getattr(media, name) for name in media.__struct_fields__}
    short = decoder.decode_audio(Media(**{**fields, "seconds": 0.5}), 16_000)
    assert len(short.data) == pytest.approx(4 * 8_000, abs=8)


def test_processes_serve_again_and_are_few() -> None:
    with MediaDecoder(processes=1) as one:
        for form in PICTURES:
            one.decode_image(image(picture(form)))
        first = children_of(one)
        refusal(one, image(saved(Image.effect_noise((32, 32), 9).convert("RGB"), "png")[:-700]))
        assert children_of(one) == first and len(first) == 1


def test_a_picture_that_others_allow_has_the_memory_it_needs() -> None:
    with MediaDecoder(Limits(media_pixels=1)) as small:
        for width in (8, 64, 8):
            assert small.decode_image(image(picture("png", width, 64))).width == width
        (pid,) = children_of(small)
        most, _ = resource.prlimit(pid, resource.RLIMIT_AS)
        assert most == decode.BASE_MEMORY + decode.PIXEL_MEMORY * 64 * 64


def test_a_process_that_has_died_is_replaced() -> None:
    with MediaDecoder() as lively:
        lively.decode_image(image(picture("png")))
        _, child = lively._idle[0]
        child._process.kill()
        child._process.wait()
        assert lively.decode_image(image(picture("png"))).width == 6


def test_one_that_dies_in_the_middle_is_tried_again() -> None:
    with Unruly("raise SystemExit") as unruly:
        assert unruly.decode_image(image(picture("png"))).width == 6


def test_a_file_that_always_ends_its_process_is_refused() -> None:
    with Unruly("raise SystemExit", "import os; os.abort()") as unruly:
        assert "damaged" in refusal(unruly, image(picture("png")))
        assert unruly.decode_image(image(picture("png"))).width == 6


def test_one_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Unruly("import time; time.sleep(60)") as unruly:
        monkeypatch.setattr(decode, "IMAGE_S", 0.2)
        assert "takes too long" in refusal(unruly, image(picture("png")))
        monkeypatch.undo()
        assert unruly.decode_image(image(picture("png"))).width == 6
        assert len(children_of(unruly)) == 1


def test_one_that_computes_too_long_is_ended_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again: that would take as long."""
    endless = "import signal; signal.raise_signal(signal.SIGXCPU)"
    with Unruly(endless) as unruly:
        assert "takes too long" in refusal(unruly, image(picture("png")))
        assert not children_of(unruly)


def test_a_busy_machine_is_no_reason_to_refuse_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for longer than it may compute."""
    slow = "import time; time.sleep(0.5); send(link, {'width': 2, 'height': 2}, bytes(12))"
    with Unruly(slow) as unruly:
        monkeypatch.setattr(decode, "IMAGE_S", 0.4)
        assert unruly.decode_image(image(picture("png"))).width == 2


@pytest.mark.parametrize(
    "does",
    [
        "send(link, {'width': 2, 'height': 2}, bytes(5))",
        "send(link, {'width': 'much'}, bytes(12))",
        "send(link, {})",
        "send(link, 5)",
        "send(link, {'error': '0x7f12345678'})",
        "link.sendall(b'\\xff' * 64)",
    ],
)
def test_a_process_that_was_taken_over_tells_nothing(does: str) -> None:
    with Unruly(does, does) as unruly:
        assert refusal(unruly, image(picture("png"))).endswith(f"cannot be decoded: {decode.DAMAGED}.")


def test_without_the_packages_the_error_says_what_to_install() -> None:
    class Bare(MediaDecoder):
        def _start(self, work: str) -> SandboxProcess:
            return SandboxProcess("-S", str(CHILD), work, str(self._memory))

    with Bare() as bare:
        assert "install dragoman[media]" in refusal(bare, image(picture("png")))


def test_a_process_can_open_nothing() -> None:
    program = f"""
import sys; sys.path.insert(0, {str(CHILD.parent)!r})
import socket, os, sandbox
sandbox.restrict_process(1 << 30)
for does in (lambda: open("/etc/passwd"), lambda: socket.socket(), lambda: bytearray(1 << 31)):
    try:
        does()
        print("could")
    except (OSError, MemoryError):
        pass
"""
    completed = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert (completed.stdout, completed.stderr) == ("", "")


def test_it_can_be_awaited() -> None:
    async def both() -> tuple[int, int]:
        async with MediaDecoder() as media_decoder:
            pixels = await media_decoder.adecode_image(image(picture("png")))
            return pixels.width, len((await media_decoder.adecode_audio(audio(sound("wav")), 16_000)).data)

    assert asyncio.run(both()) == (6, 4 * 8_000)


def test_a_process_that_is_asked_once_is_gone_afterwards() -> None:
    says = ANSWERS.format(folder=str(CHILD.parent), does="send(link, {}, frame[1][::-1])")
    assert asyncio.run(run_once(b"abc", 10.0, 100, "-c", says)) == b"cba"


def test_closing_ends_all(decoder: MediaDecoder) -> None:
    media_decoder = MediaDecoder()
    media_decoder.decode_image(image(picture("png")))
    (pid,) = children_of(media_decoder)
    media_decoder.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(DecodeFailure):
        decoder.ask("image", {"format": "png", "pixels": 1}, picture("png"), 5.0, 10)
