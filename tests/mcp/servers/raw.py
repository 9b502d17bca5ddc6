"""An MCP server on standard input and output, made by hand, that can misbehave: `python raw.py [START]`.

START is what it does when it is connected to; after that, the name of the called tool says what happens.
It lists one of them, or after `all` those that follow.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

START = sys.argv[1] if len(sys.argv) > 1 else "good"
names = ["say"] if START != "all" else sys.argv[2:]
BURST = {"level": "info", "data": "x" * 100}


def send(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def answer(number: int, text: str) -> None:
    send({"id": number, "result": {"content": [{"type": "text", "text": text}]}})


def call(number: int, name: str, arguments: dict[str, Any]) -> None:
    match name:
        case "die":
            os._exit(3)
        case "hang":
            pass
        case "chatter":
            print("starting up...\n{\n\n[1]", flush=True)
            answer(number, "after the chatter")
        case "shapeless":
            send({"id": number, "result": {"content": "text"}})
        case "endless":
            # More than any message may have.
            sys.stdout.write("x" * 64_000_000)
            sys.stdout.flush()
        case "long":
            answer(number, "x" * arguments["chars"])
        case "values":
            send({"id": number, "result": {"content": [], "_meta": {"rows": [0] * arguments["values"]}}})
        case "refuse":
            secret = os.environ.get("SECRET", "")
            send({"id": number, "error": {"code": -32050, "message": f"no entry with {secret}"}})
        case "grow":
            names.append("new")
            send({"method": "notifications/tools/list_changed"})
            answer(number, "grown")
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            answer(number, str(child.pid))
        case "burst":
            notice = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": BURST}) + "\n"
            for _ in range(arguments["messages"] // 100):
                sys.stdout.write(notice * 100)
            answer(number, "after the burst")
        case "echo":
            send({"id": number, "method": "tools/call", "params": {"name": "echo", "arguments": {}}})
            answer(number, "after the echo")
        case "strangers":
            for other in (number + 1000, -1, "a", None, 1.5):
                send({"id": other, "result": {"content": []}})
            answer(number, "after the strangers")
        case "binary":
            sys.stdout.buffer.write(bytes(range(256)) * 100 + b"\n" + b"[" * 100_000 + b"\n")
            answer(number, "after the noise")
        case "link":
            parts = [{"type": "resource_link", "uri": arguments["url"], "name": "a"}]
            send({"id": number, "result": {"content": parts}})
        case "leave":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            answer(number, str(child.pid))
            os._exit(3)
        case "environment":
            answer(number, json.dumps(dict(os.environ)))
        case _:
            answer(number, f"{name} {json.dumps(arguments)} {os.getpid()}")


def tools(number: int, cursor: str | None) -> None:
    listed = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
    if START == "pages":
        page = int(cursor or 0)
        more = {"nextCursor": str(page + 1)} if page < 2 else {}
        send({"id": number, "result": {"tools": [{**listed[0], "name": f"tool{page}"}], **more}})
    elif START == "endless pages":
        send({"id": number, "result": {"tools": listed, "nextCursor": "again"}})
    elif START == "many":
        send({"id": number, "result": {"tools": listed * 1000}})
    else:
        send({"id": number, "result": {"tools": listed}})


def initialize(number: int, params: dict[str, Any]) -> None:
    info = {"name": "raw", "version": "1"}
    version = "1999-01-01" if START == "unknown revision" else params["protocolVersion"]
    capabilities = {"tools": {"listChanged": True}}
    send(
        {
            "id": number,
            "result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info},
        }
    )


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        number, params = message.get("id"), message.get("params") or {}
        match message.get("method"):
            case _ if START == "silent":
                continue
            case None:
                # Our own request came back to us, or an answer to what is none.
                continue
            case "initialize":
                initialize(number, params)
            case "tools/list":
                tools(number, params.get("cursor"))
            case "tools/call":
                call(number, params["name"], params.get("arguments") or {})
            case _ if number is None:
                continue
            case _ if START == "old":
                sys.exit("What is this?")
            case _:
                send({"id": number, "error": {"code": -32601, "message": "Method not found"}})
    if START == "stays":
        time.sleep(600)


main()
