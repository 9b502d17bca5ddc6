"""Routes of files and multipart uploads. Received bytes are on disk before more are read."""

from functools import partial
from typing import NamedTuple

from dragoman.api import files as bodies
from dragoman.api.files import describe_file, describe_page, describe_upload
from dragoman.api.multipart import FORM_BYTES, FieldEnd, FieldStart, FormReader, boundary_of
from dragoman.errors import BadRequest
from dragoman.http.app_state import AppState
from dragoman.http.exchange import Exchange
from dragoman.http.query_string import QueryString
from dragoman.store.files import CONTENT, IncomingFile

BEGINNING_BYTES = 64 * 1024
"""Bytes at the start of a file that are checked before it is stored."""
LONGEST_LIST = 10_000


async def create(host: AppState, exchange: Exchange) -> None:
    async with host.files.incoming(exchange.owner) as incoming:
        form = await _received(host, exchange, "file", incoming)
        asked = bodies.read_form(form.values)
        bodies.check_beginning(asked.purpose, form.beginning, incoming.size)
        file = await incoming.commit(form.filename, asked.purpose, asked.keep_s)
    await exchange.json(describe_file(file))


class _Form(NamedTuple):
    values: dict[str, str]
    filename: str
    beginning: bytes


async def _received(host: AppState, exchange: Exchange, field: str, incoming: IncomingFile) -> _Form:
    """Read the form of a request; its only file, in the field of this name, is written as it arrives."""
    reader = FormReader(boundary_of(exchange.headers.get(b"content-type", b"")))
    values: dict[str, bytearray] = {}
    filename: str | None = None
    beginning = b""
    name = ""
    async for piece in exchange.pieces(host.limits.file_bytes + FORM_BYTES):
        for event in reader.feed(piece):
            if isinstance(event, FieldStart):
                name = event.name
                if name in values or (name == field and filename is not None):
                    raise BadRequest(
                        f"The form has the field '{name[:64]}' twice; send it once.",
                        param=name,
                        code="invalid_form",
                    )
                if event.filename is not None and name != field:
                    raise BadRequest(
                        f"The form has a file in the field '{name[:64]}'; only '{field}' may be a file.",
                        param=name,
                        code="invalid_form",
                    )
                if name == field:
                    filename = event.filename or field
                else:
                    values[name] = bytearray()
            elif isinstance(event, FieldEnd):
                continue
            elif name == field:
                if len(beginning) < BEGINNING_BYTES:
                    beginning += event[: BEGINNING_BYTES - len(beginning)]
                await incoming.write(event)
            else:
                values[name] += event
    reader.end()
    if filename is None:
        raise BadRequest(
            f"The form has no file in the field '{field}'; add it.", param=CONTENT, code="missing_field"
        )
    return _Form({each: _text(each, value) for each, value in values.items()}, filename, beginning)


def _text(name: str, value: bytearray) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRequest(
            f"The form field '{name[:64]}' is not valid UTF-8.", param=name, code="invalid_form"
        ) from None


async def list_all(host: AppState, exchange: Exchange) -> None:
    query = QueryString(exchange)
    cut = query.page_params("desc", usual=LONGEST_LIST, longest=LONGEST_LIST)
    page = await exchange.load_stored(host.files.page, exchange.owner, **cut, purpose=query.text("purpose"))
    shown = [describe_file(file) for file in page.data]
    await exchange.json(describe_page(shown, page.has_more), size=256 * len(shown))


async def retrieve(host: AppState, exchange: Exchange) -> None:
    await exchange.json(describe_file(await host.files.get(exchange.owner, exchange.path_id)))


async def content(host: AppState, exchange: Exchange) -> None:
    """Reply with the bytes as a download, never as a page: the client that uploaded them is not trusted."""
    file, opened = await host.files.open(exchange.owner, exchange.path_id)
    extra = {b"content-disposition": b"attachment"}
    media = b"application/octet-stream"
    await exchange.reply_in_pieces(file.bytes, host.files.pieces(opened), media, extra)


async def delete(host: AppState, exchange: Exchange) -> None:
    await host.files.delete(exchange.owner, exchange.path_id)
    await exchange.json(bodies.describe_deleted(exchange.path_id))


# Multipart uploads.


async def begin(host: AppState, exchange: Exchange) -> None:
    asked, _ = await exchange.read(bodies.read_upload)
    upload = await host.files.begin_upload(
        exchange.owner,
        filename=asked.filename,
        purpose=asked.purpose,
        size=asked.bytes,
        keep_s=bodies.keep_seconds(asked.purpose, asked.expires_after),
    )
    await exchange.json(describe_upload(upload))


async def add_part(host: AppState, exchange: Exchange) -> None:
    id_ = exchange.path_id
    upload = await host.files.run(partial(host.files.pending, exchange.owner, id_))
    async with host.files.incoming(exchange.owner, upload.bytes) as incoming:
        form = await _received(host, exchange, "data", incoming)
        if form.values:
            raise BadRequest("The form of a part may have only the field 'data'.", code="invalid_form")
        part = await incoming.commit_part(id_)
    await exchange.json(bodies.describe_part(part, id_, int(host.files.clock())))


async def complete(host: AppState, exchange: Exchange) -> None:
    asked, _ = await exchange.read(bodies.read_completion)
    upload = await host.files.complete_upload(exchange.owner, exchange.path_id, asked.part_ids, asked.md5)
    await exchange.json(describe_upload(upload))


async def cancel(host: AppState, exchange: Exchange) -> None:
    await exchange.json(describe_upload(await host.files.cancel_upload(exchange.owner, exchange.path_id)))
