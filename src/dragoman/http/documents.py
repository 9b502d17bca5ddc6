"""The text of files that are parts of messages: of those that a key has uploaded, or that came along."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import msgspec

from dragoman.api.documents import PURPOSES, FilePart, FoundFiles, introduce
from dragoman.api.read import check_shape
from dragoman.errors import BadRequest, NotFound, Unavailable
from dragoman.limits import Limits
from dragoman.store.files import FileShelf
from dragoman.turns.queue import Aside

PDF = b"%PDF-"
PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")
PDF_PAGES = 1000
PDF_S = 30.0
AT_ONCE = 2
"""PDF files that are read at the same time."""
CHILD = Path(__file__).with_name("read_pdf.py")
REASONS = {
    "no_reader": "this server reads no PDF: whoever runs it has to install dragoman[pdf]",
    "encrypted": "it is encrypted",
    "too_many_pages": f"it has more than {PDF_PAGES} pages",
    "too_much_text": "it has more text than a request may have",
    "unreadable": "it cannot be read as a PDF",
    "too_slow": f"reading it takes more than {PDF_S:.0f} seconds",
}


class Documents:
    """`await documents.fill(owner, body, aside)`: the body with the texts of its files."""

    def __init__(self, files: FileShelf, limits: Limits) -> None:
        self._files = files
        self._limits = limits
        self._reading = asyncio.Semaphore(AT_ONCE)

    async def fill(self, owner: str, body: bytes, aside: Aside) -> bytes:
        found = await aside(len(body), partial(self._find, body))
        if not found.parts:
            return body
        left = self._limits.document_bytes
        texts: list[str] = []
        for part in found.parts:
            data, name = await self._bytes_of(owner, part, left)
            left -= len(data)
            texts.append(introduce(name, await self._text(data, part.place, aside)))
        return await aside(len(body) + self._limits.document_bytes - left, partial(found.filled, texts))

    def _find(self, body: bytes) -> FoundFiles:
        check_shape(body, self._limits)
        return FoundFiles(body)

    async def _bytes_of(self, owner: str, part: FilePart, most: int) -> tuple[bytes, str | None]:
        if part.data is not None:
            self._check_size(len(part.data), most, part.place)
            return part.data, part.filename
        assert part.file_id is not None
        place = f"{part.place}.file_id"
        try:
            file, opened = await self._files.open(owner, part.file_id)
        except NotFound:
            message = f"'{place}': there is no file '{part.file_id[:128]}'."
            raise BadRequest(message, param=place, code="file_not_found") from None
        with opened:
            if file.purpose not in PURPOSES:
                message = f"'{place}': this file is for {file.purpose}; upload it for user_data."
                raise BadRequest(message, param=place, code="invalid_value")
            self._check_size(file.bytes, most, part.place)
            name = part.filename if part.filename is not None else file.filename
            return await self._files.do(opened.read), name

    def _check_size(self, size: int, most: int, place: str) -> None:
        if size > most:
            most = self._limits.document_bytes
            message = f"'{place}': the files of a request may have {most} bytes together."
            raise BadRequest(message, param=place, code="limit_exceeded")

    async def _text(self, data: bytes, place: str, aside: Aside) -> str:
        if data.startswith(PDF):
            return await self._pdf_text(data, place)
        if data.startswith(PICTURES):
            message = f"'{place}': this model takes text only; images are not supported."
            raise BadRequest(message, param=place, code="unsupported_content")
        try:
            text = await aside(len(data), data.decode)
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            message = f"'{place}': the file is neither text in UTF-8 nor a PDF."
            raise BadRequest(message, param=place, code="unsupported_content")
        return text

    async def _pdf_text(self, data: bytes, place: str) -> str:
        async with self._reading:
            said = await read_pdf(data, self._limits.content_chars)
        if "text" in said:
            return said["text"]
        reason = REASONS.get(said.get("error", ""), REASONS["unreadable"])
        raise BadRequest(f"'{place}': {reason}.", param=place, code="unsupported_content")


async def read_pdf(data: bytes, most_chars: int) -> dict[str, str]:
    """What the process that reads it says of it."""
    try:
        said = await ask_process(data, PDF_S, str(CHILD), str(PDF_PAGES), str(most_chars))
        return msgspec.json.decode(said, type=dict[str, str])
    except TimeoutError:
        return {"error": "too_slow"}
    except msgspec.DecodeError:
        # It was ended for what it took.
        return {"error": "unreadable"}


async def ask_process(data: bytes, seconds: float, *command: str) -> bytes:
    """What a Python process of its own makes of what strangers sent; it is gone when this returns."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", *command),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
        )
    except OSError as error:
        raise Unavailable("No process can be begun to look at this; try again.") from error
    try:
        async with asyncio.timeout(seconds):
            said, _ = await process.communicate(data)
        return said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
