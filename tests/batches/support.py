"""Lines of batches, and a desk for them without a server."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from dragoman.api.batches import BatchLineCodec, LineReply, LineRequest, OpenAILineCodec
from dragoman.api.messages.batches import MessagesLineCodec
from dragoman.batches.manager import TERMINAL_STATES, BatchManager
from dragoman.limits import Limits
from dragoman.store.files import FileStore, Quota
from dragoman.store.records import StoredBatch

QUOTA = Quota(files=100, bytes=10**9, file_bytes=10**9)
CHAT = "/v1/chat/completions"


def line(custom_id: str, text: str = "hi", url: str = CHAT, **more: Any) -> dict[str, Any]:
    body = {"model": "parrot", "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[dict[str, Any] | str]) -> bytes:
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines).encode()


def read_lines(text: bytes | str) -> list[dict[str, Any]]:
    return [json.loads(one) for one in text.splitlines()]


async def echo(asked: LineRequest) -> LineReply:
    """The text of the request is its answer; `bad` is none."""
    await asyncio.sleep(0)
    text = json.loads(asked.body)["messages"][0]["content"]
    if text == "bad":
        return LineReply(400, "req", b'{"error": {"code": "no", "message": "No."}}')
    usage = b'"usage": {"prompt_tokens": 2, "completion_tokens": 1}'
    return LineReply(200, "req", b'{"text": %b, %b}' % (json.dumps(text).encode(), usage))


def desk(
    folder: Path,
    answer: Callable[[LineRequest], Awaitable[LineReply]] = echo,
    clock: Callable[[], float] | None = None,
    most: int = 4,
) -> tuple[FileStore, BatchManager]:
    files = FileStore(folder, QUOTA, clock=clock)
    lines: dict[str, BatchLineCodec] = {"openai": OpenAILineCodec(), "anthropic": MessagesLineCodec()}
    manager = BatchManager(
        files, lines, lambda _, asked: answer(asked), lambda: most, Limits(), lambda _: None
    )
    return files, manager


async def begin(manager: BatchManager, content: bytes, **more: Any) -> StoredBatch:
    def put(path: Path) -> str:
        path.write_bytes(content)
        return "file-1"

    return await manager.create("openai", "ann", CHAT, put, **more)


async def ended(manager: BatchManager, id_: str) -> StoredBatch:
    async with asyncio.timeout(30):
        while (batch := await manager.get("openai", "ann", id_)).status not in TERMINAL_STATES:
            await asyncio.sleep(0.01)
        return batch
