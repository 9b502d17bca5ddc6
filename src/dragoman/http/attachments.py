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

from dragoman.api.attachments import PURPOSES, BodyAttachments, FilePart, InlineMedia, Piece, introduce
from dragoman.api.request_decoder import check_shape
from dragoman.errors import BadRequest, NotFound
from dragoman.limits import Limits, check_count
from dragoman.media.decode import DecodeFailure, MediaDecoder
from dragoman.media.fetch import MediaFetcher
from dragoman.media.headers import KINDS, MEDIA_TYPES, InvalidMedia, find_format
from dragoman.store.files import FileStore
from dragoman.turns.queue import Offloader

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


class AttachmentResolver:
    """Inserts the contents of files: `await documents.fill(owner, body, aside)` is the new body."""

    def __init__(self, files: FileStore, limits: Limits, fetcher: MediaFetcher, sees: Sees) -> None:
        self._files = files
        self._limits = limits
        self._fetcher = fetcher
        self._sees = sees
        self._decoder = MediaDecoder(limits)

    async def close(self) -> None:
        await asyncio.to_thread(self._decoder.close)

    async def fill(self, owner: str, body: bytes, offload: Offloader) -> bytes:
        files = await offload(len(body), partial(self._find, body))
        if not files.parts:
            return body
        left = self._limits.document_bytes
        pieces: list[list[Piece]] = []
        for part in files.parts:
            data, name = await self._bytes_of(owner, part, left)
            left -= len(data)
            pieces.append(await self._pieces(owner, files.model, part, data, name, offload))
        size = sum(len(one if isinstance(one, str) else one.base64) for each in pieces for one in each)
        return await offload(len(body) + size, partial(files.filled, pieces))

    def _find(self, body: bytes) -> BodyAttachments:
        check_shape(body, self._limits)
        files = BodyAttachments(body)
        links = [part.param for part in files.parts if part.url is not None]
        if links:
            check_count(len(links), self._limits.media_fetches, links[-1], "files to fetch")
        return files

    async def _bytes_of(self, owner: str, part: FilePart, most: int) -> tuple[bytes, str | None]:
        if part.data is not None:
            self._check_size(len(part.data), most, part.param)
            return part.data, part.filename
        if part.url is not None:
            most = min(most, self._limits.media_bytes) if part.kind else most
            return await self._fetcher.fetch(owner, part.url, most, part.param), part.filename
        assert part.file_id is not None
        param_path = f"{part.param}.file_id"
        try:
            file, opened = await self._files.open(owner, part.file_id)
        except NotFound:
            message = f"'{param_path}': no file found with id '{part.file_id[:128]}'."
            raise BadRequest(message, param=param_path, code="file_not_found") from None
        with opened:
            if file.purpose not in PURPOSES:
                message = (
                    f"'{param_path}': this file has the purpose {file.purpose}; upload it with user_data."
                )
                raise BadRequest(message, param=param_path, code="invalid_value")
            self._check_size(file.bytes, most, part.param)
            name = part.filename if part.filename is not None else file.filename
            return await self._files.run(opened.read), name

    def _check_size(self, size: int, most: int, param_path: str) -> None:
        if size > most:
            most = self._limits.document_bytes
            message = (
                f"'{param_path}': the files of the request have more than {most} bytes together; send less."
            )
            raise BadRequest(message, param=param_path, code="limit_exceeded")

    async def _pieces(
        self, owner: str, model: str | None, part: FilePart, data: bytes, name: str | None, offload: Offloader
    ) -> list[Piece]:
        if part.kind is None and data.startswith(PDF):
            return await self._pages(data, name, part.param, sees=await self._sees(owner, model))
        try:
            form = find_format(data, part.kind)
        except InvalidMedia as error:
            if part.kind is not None:
                raise BadRequest(f"'{part.param}': {error}", param=part.param, code=error.code) from None
            return [introduce(name, await self._text(data, part.param, offload))]
        encoded = await offload(len(data), lambda: base64.b64encode(data).decode())
        return [InlineMedia(KINDS[form], form, MEDIA_TYPES[form], encoded)]

    async def _text(self, data: bytes, pointer: str, offload: Offloader) -> str:
        try:
            text = await offload(len(data), data.decode)
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            message = f"'{pointer}': the file is not UTF-8 text, PDF, image or audio; send one of these."
            raise BadRequest(message, param=pointer, code="unsupported_content")
        return text

    async def _pages(self, data: bytes, name: str | None, param_path: str, *, sees: bool) -> list[Piece]:
        """Return the text of all pages, or for each page its text and image."""
        texts, drawn = await self._read_pdf(data, param_path, sees=sees)
        if not drawn:
            return [introduce(name, "\n\n".join(texts))]
        pieces: list[Piece] = []
        for number, (text, page) in enumerate(zip(texts, drawn, strict=True), 1):
            value = f"Page {number}:\n\n{text}"
            pieces += [introduce(name, value) if number == 1 else value]
            pieces += [InlineMedia("image", "jpeg", MEDIA_TYPES["jpeg"], base64.b64encode(page).decode())]
        return pieces

    async def _read_pdf(self, data: bytes, param_path: str, *, sees: bool) -> tuple[list[str], list[bytes]]:
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
            result, value = await asyncio.to_thread(reading)
            return _split(result, value)
        except DecodeFailure as failure:
            word = str(failure)
        reason = NO_PAGES if sees and word == "missing" else REASONS.get(word, REASONS["unreadable"])
        raise BadRequest(f"'{param_path}': {reason}.", param=param_path, code="unsupported_content")


class _PdfPages(Struct):
    texts: list[str]
    sizes: list[Annotated[int, Meta(ge=0)]]


def _split(result: object, value: bytes | memoryview) -> tuple[list[str], list[bytes]]:
    """Validate and split the decoder process's reply about a PDF, which is not trusted."""
    try:
        pdf_pages = msgspec.convert(result, _PdfPages)
    except msgspec.ValidationError:
        raise DecodeFailure("unreadable") from None
    pages, at = [], 0
    for size in pdf_pages.sizes:
        pages.append(bytes(value[at : at + size]))
        at += size
    if at != len(value) or (pages and len(pages) != len(pdf_pages.texts)):
        raise DecodeFailure("unreadable")
    return pdf_pages.texts, pages
