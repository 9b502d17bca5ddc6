"""Decoding of images and audio in sandboxed processes (`src/dragoman/media/sandbox.py`).

    with MediaDecoder(limits) as decoder:
        pixels = decoder.decode_image(media)     # in a thread; `await decoder.adecode_image(media)` elsewhere

A process is started when there is work and none is free, serves many files, and is replaced when it has died
or was killed. Only BadRequest and Unavailable are raised.
"""

import asyncio
import importlib.util
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.errors import CONVERSATION, BadRequest, SettingsError, Unavailable
from dragoman.limits import Limits
from dragoman.media import Media, MediaKind
from dragoman.media.headers import SAMPLES_A_SECOND, WORDS
from dragoman.media.sandbox import receive, send

CHILD = Path(__file__).with_name("sandbox.py")
PACKAGES: dict[MediaKind, str] = {"image": "PIL", "audio": "soundfile"}
IMAGE_S, AUDIO_S = 20.0, 60.0
"""Limits on CPU time, not wall time, so that a busy machine does not refuse valid files."""
WAITS = 6
"""Wall time limit as a multiple of the CPU time limit."""
PATIENCE_S = 60.0
"""Maximum number of seconds to wait for a free process."""
USES = 256
"""Maximum number of files per process: libraries may leak or retain data."""
BASE_MEMORY = 768 * 1024 * 1024
PIXEL_MEMORY = SAMPLE_MEMORY = 12
"""Bytes per pixel, and per audio sample, with all copies made on the way."""
REASONS = {
    "missing": "this server has no decoder; its operator can install dragoman[media]",
    "too_large": "it is larger than its header states",
    "too_slow": "decoding it takes too long",
}
DAMAGED = "it is damaged or truncated; save it again"


class DecodedImage(Struct, frozen=True):
    """A decoded image: rows from the top, pixels from the left; red, green and blue, one byte each."""

    width: int
    height: int
    rgb: bytes | memoryview

    @property
    def array(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.rgb, np.uint8).reshape(self.height, self.width, 3)


class DecodedAudio(Struct, frozen=True):
    """Decoded audio: 32-bit floats, little endian, one channel."""

    rate: int
    data: bytes | memoryview

    @property
    def array(self) -> NDArray[np.float32]:
        return np.frombuffer(self.data, "<f4")


class DecodeFailure(Exception):
    """Reason, in one word, why a process could not decode a file."""


def check_installed(kind: MediaKind) -> None:
    """Raise if the decoder's package is missing; called when an engine starts, before
    the first file comes.
    """
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        raise SettingsError(f"To decode {WORDS[kind][0]}, install dragoman[media].")


class SandboxProcess:
    """A sandbox process with one socket. It answers requests one after another, or is killed."""

    memory = 0
    """Memory limit in bytes, if one is set."""

    def __init__(self, *command: str) -> None:
        self.asked = 0
        self._link, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-I", *command),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            self._link.close()
            raise Unavailable("The server could not start a process for this file; retry later.") from error
        finally:
            theirs.close()

    def ask(self, question: Any, data: bytes, seconds: float, most: int) -> tuple[Any, bytes | memoryview]:
        """Return the reply, with at most `most` bytes; raise TimeoutError, or another OSError if the process
        died.
        """
        self.asked += 1
        until = time.monotonic() + seconds
        send(self._link, question, data, until)
        try:
            answer = receive(self._link, until, most)
        except ConnectionError:
            answer = None
        if answer is None:
            raise TimeoutError if self._used_up else OSError("the process is gone")
        return answer

    @property
    def _used_up(self) -> bool:
        """Whether the system killed the process because of its CPU time."""
        try:
            return self._process.wait(1) == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        """Kill the process, from any thread: a caller waiting for its reply gets an error."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()


class MediaDecoder:
    """Pool of a few processes, each for one kind of file, started on demand. Threads may share it."""

    def __init__(self, limits: Limits | None = None, processes: int = 2) -> None:
        self._limits = limits or Limits()
        self._memory = BASE_MEMORY + PIXEL_MEMORY * self._limits.media_pixels
        self._places = threading.BoundedSemaphore(processes)
        self._lock = threading.Lock()
        self._idle: list[tuple[str, SandboxProcess]] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, child in idle:
            child.kill()

    async def adecode_image(self, media: Media) -> DecodedImage:
        return await asyncio.to_thread(self.decode_image, media)

    async def adecode_audio(self, media: Media, rate: int) -> DecodedAudio:
        return await asyncio.to_thread(self.decode_audio, media, rate)

    def decode_image(self, media: Media) -> DecodedImage:
        # The header was checked against the server's limits, which may differ from these.
        pixels = media.width * media.height
        self._make_room(BASE_MEMORY + PIXEL_MEMORY * pixels)
        asked = {"format": media.format, "pixels": pixels}
        try:
            header, rgb = self.ask("image", asked, media.data, IMAGE_S, 3 * pixels)
            width, height = int(header["width"]), int(header["height"])
        except (DecodeFailure, KeyError, TypeError, ValueError) as error:
            raise _unreadable(media, f"{media.width} × {media.height}", str(error)) from None
        if len(rgb) != 3 * width * height or not rgb:
            raise _unreadable(media, f"{media.width} × {media.height}", "")
        return DecodedImage(width, height, rgb)

    def decode_audio(self, media: Media, rate: int) -> DecodedAudio:
        samples = int(max(self._limits.media_seconds, media.seconds + 1) * SAMPLES_A_SECOND)
        asked = {"format": media.format, "seconds": media.seconds, "samples": samples, "rate": rate}
        most = 4 * int((media.seconds + 1) * rate)
        self._make_room(BASE_MEMORY + SAMPLE_MEMORY * most // 4)
        try:
            _, data = self.ask("audio", asked, media.data, AUDIO_S, most)
        except DecodeFailure as error:
            raise _unreadable(media, f"{media.seconds:.1f} s", str(error)) from None
        return DecodedAudio(rate, data)

    def ask(
        self, work: str, asked: dict[str, Any], data: bytes, seconds: float, most: int
    ) -> tuple[Any, bytes | memoryview]:
        """Return what a process of that kind makes of a file; raise DecodeFailure with the reason."""
        if not self._places.acquire(timeout=PATIENCE_S):
            raise Unavailable("Too many files are being decoded; retry later.", retry_after=10)
        try:
            # An idle process may be gone by now, or killed by an earlier file's limits; a new one is tried
            # once.
            try:
                return self._ask_one(self._take(work), work, asked, data, seconds, most)
            except OSError:
                return self._ask_one(self._start(work), work, asked, data, seconds, most)
        except OSError:
            raise DecodeFailure("unreadable") from None
        finally:
            self._places.release()

    def _ask_one(
        self, child: SandboxProcess, work: str, asked: dict[str, Any], data: bytes, seconds: float, most: int
    ) -> tuple[Any, bytes | memoryview]:
        keep = False
        try:
            header, payload = child.ask({**asked, "cpu": int(seconds)}, data, WAITS * seconds, most)
            keep = child.asked < USES
        except TimeoutError:
            raise DecodeFailure("too_slow") from None
        except ValueError:
            raise OSError("the reply is invalid") from None
        finally:
            self._give_back(work, child, keep)
        if not isinstance(header, dict) or "error" in header:
            raise DecodeFailure(str(header["error"]) if isinstance(header, dict) else "unreadable")
        return header, payload

    def _take(self, work: str) -> SandboxProcess:
        with self._lock:
            for at, (kind, child) in enumerate(self._idle):
                if kind == work:
                    del self._idle[at]
                    return child
        return self._start(work)

    def _start(self, work: str) -> SandboxProcess:
        memory = self._memory
        child = SandboxProcess(str(CHILD), work, str(memory))
        child.memory = memory
        return child

    def _make_room(self, memory: int) -> None:
        """Raise the memory limit of processes; idle ones with less are killed."""
        with self._lock:
            self._memory = max(self._memory, memory)
            small = [child for _, child in self._idle if child.memory < self._memory]
            self._idle = [entry for entry in self._idle if entry[1] not in small]
        for child in small:
            child.kill()

    def _give_back(self, work: str, child: SandboxProcess, keep: bool) -> None:
        with self._lock:
            keep = keep and not self._closed and child.memory >= self._memory
            if keep:
                self._idle.append((work, child))
        if not keep:
            child.kill()


def _unreadable(media: Media, measures: str, word: str) -> BadRequest:
    what = WORDS[media.kind][0].partition(" ")[2]
    message = f"The {what} ({media.format}, {measures}) cannot be decoded: {REASONS.get(word, DAMAGED)}."
    return BadRequest(message, param=CONVERSATION, code="unsupported_content")


async def run_once(data: bytes, seconds: float, most: int, *command: str) -> bytes:
    """Run a process once for untrusted bytes and return its output; the process is gone afterwards."""
    child = SandboxProcess(*command)
    try:
        _, output = await asyncio.to_thread(child.ask, {}, data, seconds, most)
        return bytes(output)
    finally:
        child.kill()
