"""Files in messages: uploaded by the same key, sent inline, or fetched.

Their contents replace them in the body before it is parsed: text, images and audio unchanged, PDF files as
the text of their pages and, for a vision model, an image of each page.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from dragoman.api.documents import PURPOSES, FilePart, FoundFiles, Inline, Piece, introduce
from dragoman.api.read import check_shape
from dragoman.errors import BadRequest, NotFound
from dragoman.limits import Limits, check_count
from dragoman.media.decode import DecodeFailure, MediaDecoder
from dragoman.media.fetch import MediaFetcher
from dragoman.media.read import KINDS, MEDIA_TYPES, NoMedia, find_format
from dragoman.store.files import FileShelf
from dragoman.turns.queue import Aside

PDF = b"%PDF-"
PDF_PAGES = 1000
PDF_S = 30.0
PAGE_PICTURES = 100
"""Maximum pages of a PDF to render as images; each page uses as much context as an image. Longer ones are
read as text only."""
PAGE_SIDE = 1536
"""Pixels of the longer side of a page image."""
REASONS = {
    "missing": "this server cannot read PDF files; its operator has to install dragoman[pdf]",
    "encrypted": "the PDF is encrypted; send it without a password",
    "too_many_pages": f"the PDF has more than {PDF_PAGES} pages; send a part of it",
    "too_much_text": "the PDF has more text than a request may have; send a part of it",
    "too_large": "the images of the PDF's pages are larger than a request may have; send a part of it",
    "unreadable": "the file is not a valid PDF",
    "too_slow": f"reading the PDF takes more than {PDF_S:.0f} seconds of CPU time; send a part of it",
}
NO_PAGES = "this server cannot render PDF pages; its operator has to install dragoman[media]"

Sees: TypeAlias = Callable[[str, str | None], Awaitable[bool]]
"""Returns whether the model named by an owner's request takes images."""


class Documents:
    """Inserts the contents of files: `await documents.fill(owner, body, aside)` is the new body."""

    def __init__(self, files: FileShelf, limits: Limits, fetcher: MediaFetcher, sees: Sees) -> None:
        self._files = files
        self._limits = limits
        self._fetcher = fetcher
        self._sees = sees
        self._decoder = MediaDecoder(limits)

    async def close(self) -> None:
        await asyncio.to_thread(self._decoder.close)

    async def fill(self, owner: str, body: bytes, aside: Aside) -> bytes:
        files = await aside(len(body), partial(self._find, body))
        if not files.parts:
            return body
        left = self._limits.document_bytes
        pieces: list[list[Piece]] = []
        for part in files.parts:
            data, name = await self._bytes_of(owner, part, left)
            left -= len(data)
            pieces.append(await self._pieces(owner, files.model, part, data, name, aside))
        size = sum(len(one if isinstance(one, str) else one.base64) for each in pieces for one in each)
        return await aside(len(body) + size, partial(files.filled, pieces))

    def _find(self, body: bytes) -> FoundFiles:
        check_shape(body, self._limits)
        files = FoundFiles(body)
        links = [part.place for part in files.parts if part.url is not None]
        if links:
            check_count(len(links), self._limits.media_fetches, links[-1], "files to fetch")
        return files

    async def _bytes_of(self, owner: str, part: FilePart, most: int) -> tuple[bytes, str | None]:
        if part.data is not None:
            self._check_size(len(part.data), most, part.place)
            return part.data, part.filename
        if part.url is not None:
            most = min(most, self._limits.media_bytes) if part.kind else most
            return await self._fetcher.fetch(owner, part.url, most, part.place), part.filename
        assert part.file_id is not None
        place = f"{part.place}.file_id"
        try:
            file, opened = await self._files.open(owner, part.file_id)
        except NotFound:
            message = f"'{place}': no file found with id '{part.file_id[:128]}'."
            raise BadRequest(message, param=place, code="file_not_found") from None
        with opened:
            if file.purpose not in PURPOSES:
                message = f"'{place}': this file has the purpose {file.purpose}; upload it with user_data."
                raise BadRequest(message, param=place, code="invalid_value")
            self._check_size(file.bytes, most, part.place)
            name = part.filename if part.filename is not None else file.filename
            return await self._files.do(opened.read), name

    def _check_size(self, size: int, most: int, place: str) -> None:
        if size > most:
            most = self._limits.document_bytes
            message = f"'{place}': the files of the request have more than {most} bytes together; send less."
            raise BadRequest(message, param=place, code="limit_exceeded")

    async def _pieces(
        self, owner: str, model: str | None, part: FilePart, data: bytes, name: str | None, aside: Aside
    ) -> list[Piece]:
        if part.kind is None and data.startswith(PDF):
            return await self._pages(data, name, part.place, sees=await self._sees(owner, model))
        try:
            form = find_format(data, part.kind)
        except NoMedia as error:
            if part.kind is not None:
                raise BadRequest(f"'{part.place}': {error}", param=part.place, code=error.code) from None
            return [introduce(name, await self._text(data, part.place, aside))]
        encoded = await aside(len(data), lambda: base64.b64encode(data).decode())
        return [Inline(KINDS[form], form, MEDIA_TYPES[form], encoded)]

    async def _text(self, data: bytes, place: str, aside: Aside) -> str:
        try:
            text = await aside(len(data), data.decode)
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            message = f"'{place}': the file is not UTF-8 text, PDF, image or audio; send one of these."
            raise BadRequest(message, param=place, code="unsupported_content")
        return text

    async def _pages(self, data: bytes, name: str | None, place: str, *, sees: bool) -> list[Piece]:
        """Return the text of all pages, or for each page its text and image."""
        texts, drawn = await self._read_pdf(data, place, sees=sees)
        if not drawn:
            return [introduce(name, "\n\n".join(texts))]
        pieces: list[Piece] = []
        for number, (text, page) in enumerate(zip(texts, drawn, strict=True), 1):
            said = f"Page {number}:\n\n{text}"
            pieces += [introduce(name, said) if number == 1 else said]
            pieces += [Inline("image", "jpeg", MEDIA_TYPES["jpeg"], base64.b64encode(page).decode())]
        return pieces

    async def _read_pdf(self, data: bytes, place: str, *, sees: bool) -> tuple[list[str], list[bytes]]:
        limits = self._limits
        asked = {
            "pages": PDF_PAGES,
            "chars": limits.content_chars,
            "pictures": min(PAGE_PICTURES, limits.media_files) if sees else 0,
            "side": PAGE_SIDE,
            "bytes": limits.media_total_bytes,
        }
        work = "pages" if sees else "pdf"
        reading = partial(self._decoder.ask, work, asked, data, PDF_S, limits.media_total_bytes)
        try:
            said, made = await asyncio.to_thread(reading)
            return _split(said, made)
        except DecodeFailure as failure:
            word = str(failure)
        reason = NO_PAGES if sees and word == "missing" else REASONS.get(word, REASONS["unreadable"])
        raise BadRequest(f"'{place}': {reason}.", param=place, code="unsupported_content")


class _PdfPages(Struct):
    texts: list[str]
    sizes: list[Annotated[int, Meta(ge=0)]]


def _split(said: object, made: bytes | memoryview) -> tuple[list[str], list[bytes]]:
    """Validate and split the decoder process's reply about a PDF, which is not trusted."""
    try:
        told = msgspec.convert(said, _PdfPages)
    except msgspec.ValidationError:
        raise DecodeFailure("unreadable") from None
    pages, at = [], 0
    for size in told.sizes:
        pages.append(bytes(made[at : at + size]))
        at += size
    if at != len(made) or (pages and len(pages) != len(told.texts)):
        raise DecodeFailure("unreadable")
    return told.texts, pages
