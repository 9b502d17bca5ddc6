"""How far a request walks through the source: `python -m tools.walks` prints files and functions for a few.

    chat "hi"                     32 files   360 functions   (aim: 32 files)

It fails where a walk is longer than its aim. `--files` names the files too. The app is asked in this process,
without a socket, with an engine of a script. Each request is made once before it is counted: what is made
once for all does not count. Of those after it the shortest counts: what the server does by itself now and
then may happen while one is made.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from msgspec import Struct, field
from tests.mcp.support import SERVERS
from tests.support.tool_model import call, prompt_of, tool_model

from dragoman.engines.scripted import Script, say
from dragoman.http.app import App
from dragoman.settings import Settings
from dragoman.types import Job

SOURCE = f"{Path(__file__).parent.parent / 'src' / 'dragoman'}/"
STAND_INS = ("engines/scripted.py", "engines/steps.py")
TOKENS = 64
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Walk(Struct):
    """How often each function of the source was called."""

    calls: Counter[CodeType] = field(default_factory=Counter)

    def files(self, least: int = 1) -> list[str]:
        return sorted({_file(code) for code, count in self.calls.items() if count >= least})

    def functions(self, least: int = 1) -> int:
        return sum(count >= least and not code.co_name.startswith("<") for code, count in self.calls.items())

    def saw(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _is_ours(frame.f_code):
            self.calls[frame.f_code] += 1


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(SOURCE)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(SOURCE) and not code.co_filename.endswith(STAND_INS)


@contextmanager
def walking() -> Iterator[list[Walk]]:
    """The last of the list is the walk that is being made. Threads that begin in the block are seen too."""
    walks = [Walk()]

    def saw(frame: FrameType, event: str, result: Any) -> None:
        walks[-1].saw(frame, event, result)

    threading.setprofile(saw)
    sys.setprofile(saw)
    try:
        yield walks
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def answer(job: Job) -> Script:
    """What each of the requests below is answered."""
    prompt = prompt_of(job)
    if "add" in prompt:
        return say("It is 5." if "tool\n5" in prompt else call("add", a=2, b=3))
    if "weather" in prompt:
        return say(call("weather", city="Rome"))
    return say("x" * TOKENS if "long" in prompt else "hi")


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def forced(description: str) -> dict[str, Any]:
    """A tool that was not there before, so that its grammar is made."""
    schema = {**CITY, "description": description}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    return chat("hi", tools=[tool], tool_choice="required")


SUMS = {"type": "mcp", "server_label": "sums", "require_approval": "never"}
HI, FORCED, MCP, TOKEN = 'chat "hi"', "forced call", "response with an MCP call", "streamed token"
AIMS = {HI: 32, FORCED: 48, MCP: 53, TOKEN: 8}
REQUESTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    HI: (CHAT, [chat("hi"), chat("hi, you"), chat("hi, they")]),
    FORCED: (CHAT, [forced("one"), forced("other"), forced("third")]),
    MCP: (RESPONSES, [{"input": "2 + 3?", "tools": [SUMS]}] * 3),
    TOKEN: (CHAT, [chat("long", stream=True), chat("long, again", stream=True)]),
}


async def ask(app: App, path: str, body: dict[str, Any]) -> bytes:
    """The reply to a POST, as an ASGI server would have it made."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
    chunks: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if message := next(messages, None):
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return b"".join(chunks)


async def walk_all(config: str) -> dict[str, Walk]:
    """A walk for each of the requests."""
    app = App(tool_model(answer), Settings(store="memory", dialect="hermes", mcp_config=config))
    fields = {}
    with walking() as walks:
        await app.host.start()
        try:
            for name, (path, (first, *others)) in REQUESTS.items():
                for body in (first, *others):
                    walks.append(Walk())
                    data = await ask(app, path, body)
                    assert b'"error":{' not in data, data.decode()
                fields[name] = min(walks[-len(others) :], key=lambda walk: len(walk.files()))
        finally:
            await app.host.stop()
    return fields


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.walks", description=__doc__)
    parser.add_argument("--files", action="store_true", help="name the files too")
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        entry = {"command": sys.executable, "args": [str(SERVERS / "tools.py"), "stdio"]}
        json.dump({"mcpServers": {"sums": entry}}, config)
        config.flush()
        walks = asyncio.run(walk_all(config.name))
    long = False
    for name, walk in walks.items():
        # What one token walks through is called for each of them.
        least = TOKENS - 1 if name == TOKEN else 1
        files = walk.files(least)
        long |= len(files) > AIMS[name]
        counted = f"{name:26} {len(files):5} files {walk.functions(least):5} functions"
        sys.stdout.write(f"{counted}   (aim: {AIMS[name]} files)\n")
        if args.files:
            sys.stdout.write("".join(f"    {file}\n" for file in files))
    return int(long)


if __name__ == "__main__":
    sys.exit(main())
