"""Parse a model's raw output into text, reasoning and tool calls, from a file or a pipe, without a server."""

import argparse
import codecs
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dragoman.cli.exits import USAGE, CommandError
from dragoman.logs import Colorizer

if TYPE_CHECKING:
    from dragoman.dialects.declarations import Dialect
    from dragoman.types import Event

SUMMARY = "parse raw output into text, reasoning and tool calls"
EXAMPLE = """\
examples:
  dragoman parse --dialect hermes answer.txt
  dragoman parse --dialect qwen3_coder --tools tools.json < answer.txt
  some-model | dragoman parse --dialect kimi_k2 --stream

It prints {"text", "reasoning", "tool_calls": [{"id", "name", "arguments"}]}; with --stream one JSON line per
event, as soon as it is certain. `dragoman dialects` lists the dialects.
"""
STDIN = "-"
CHUNK = 1 << 16


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dragoman parse --dialect NAME [flags] [FILE]"
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default=STDIN,
        help="raw model output [default: -, standard input]",
    )
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--dialect",
        metavar="NAME",
        required=True,
        help="dialect of the output, see `dragoman dialects`, or a tokenizer_config.json "
        "with a response_template",
    )
    reading.add_argument(
        "--tools",
        metavar="FILE",
        help="tools of the request, whose schemas give arguments their types: a JSON list "
        "in OpenAI's format, one tool, or a request body with `tools`",
    )
    reading.add_argument(
        "--starts-in-reasoning",
        action="store_true",
        help="the prompt has opened reasoning, so the output starts inside it",
    )
    reading.add_argument("--no-calls", action="store_true", help="leave tool calls in the text")
    reading.add_argument("--no-reasoning", action="store_true", help="leave reasoning in the text")
    printing = parser.add_argument_group("printing")
    printing.add_argument(
        "--stream", action="store_true", help="print each event as a JSON line as soon as it is certain"
    )


def run(args: argparse.Namespace) -> int:
    from dragoman.dialects.describe import answer_json
    from dragoman.dialects.parser import Parser
    from dragoman.types import fold

    parser = Parser(
        dialect_of(args.dialect),
        tools_of(args.tools) if args.tools else (),
        args.starts_in_reasoning,
        calls=not args.no_calls,
        reasoning=not args.no_reasoning,
    )
    events: list[Event] = []
    for text in pieces_of(args.file):
        result = parser.feed(text)
        if args.stream:
            show(result)
        else:
            events += result
    if args.stream:
        show(parser.finish())
    else:
        whole = answer_json(fold(events + parser.finish()))
        print(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())
    return 0


def dialect_of(name: str) -> "Dialect":
    """Find a dialect by name, alias or file; the error suggests similar names."""
    from dragoman.dialects.registry import load_dialect
    from dragoman.errors import SettingsError

    try:
        return load_dialect(name)
    except SettingsError as error:
        raise CommandError(
            error.message.partition(" There are: ")[0], "`dragoman dialects` lists them all.", exit_code=USAGE
        ) from error


def tools_of(path: str) -> list[dict[str, Any]]:
    """Read tools from a file: a list, a single tool, or a request body with `tools`."""
    import json

    try:
        value = json.loads(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.", exit_code=USAGE) from error
    except json.JSONDecodeError as error:
        name = f"line {error.lineno}, column {error.colno}"
        raise CommandError(
            f"{path} is not valid JSON: {name}: {error.msg}.", _SHAPE, exit_code=USAGE
        ) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not UTF-8 text.", _SHAPE, exit_code=USAGE) from error
    if isinstance(value, dict):
        value = value.get("tools", [value])
    if not isinstance(value, list):
        raise CommandError(f"{path} has no list of tools.", _SHAPE, exit_code=USAGE)
    for number, tool in enumerate(value, 1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise CommandError(f"Tool {number} of {path} has no name.", _SHAPE, exit_code=USAGE)
    return value


_SHAPE = 'A tool is {"type": "function", "function": {"name": "f", "parameters": {...}}}.'


def pieces_of(file: str) -> Iterator[str]:
    """Yield the input as it arrives: data in a pipe is read at once, not when a buffer is full."""
    try:
        source = sys.stdin.fileno() if file == STDIN else os.open(Path(file).expanduser(), os.O_RDONLY)
        if os.isatty(source):
            print(
                Colorizer(sys.stderr)("dim", "reading from the terminal; Ctrl-D ends the input"),
                file=sys.stderr,
            )
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while data := os.read(source, CHUNK):
            yield decoder.decode(data)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.", exit_code=USAGE) from error
    yield decoder.decode(b"", final=True)


def show(events: "list[Event]") -> None:
    from dragoman.dialects.describe import event_json

    for event in events:
        print(msgspec.json.encode(event_json(event)).decode(), flush=True)
