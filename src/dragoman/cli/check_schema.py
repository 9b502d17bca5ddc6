"""Check whether a JSON Schema can be fully enforced, and list each keyword that cannot."""

import argparse
import sys
from pathlib import Path

import msgspec

from dragoman.cli.exits import USAGE, CommandError
from dragoman.logs import Colorizer

SUMMARY = "check whether a JSON Schema can be fully enforced"
EXAMPLE = """\
examples:
  dragoman check-schema person.json
  dragoman check-schema --text '{"name": "Ada"}' person.json    also check a JSON text against it
  some-program | dragoman check-schema -

The server rejects a schema that cannot be fully enforced with a 400, for the same reasons. The exit code is 0
if all of it is enforced, 1 if not. docs/constraints.md has the table of keywords.
"""
STDIN = "-"


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dragoman check-schema [flags] FILE"
    parser.add_argument("file", metavar="FILE", help="JSON Schema file; - is standard input")
    parser.add_argument("--text", metavar="JSON", help="JSON text to check against the schema")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from dragoman.constrain.schema.json_schema import prepare_schema
    from dragoman.constrain.schema.keywords import SchemaProblems
    from dragoman.errors import BadRequest

    text, problems = text_of(args.file), SchemaProblems()
    try:
        prepare_schema(text, problems, args.file, watched=True)
    except BadRequest as error:
        raise CommandError(error.message, exit_code=1) from error
    result = [(f"#{one.pointer}", one.message) for one in problems.items]
    accepted = accepts(text, args.text) if args.text is not None and not result else None
    if args.json:
        listed = [{"place": name, "message": message} for name, message in result]
        facts = {"enforceable": not result, "problems": listed, "accepted": accepted}
        print(msgspec.json.encode(facts).decode())
    else:
        show(args.file, result, accepted)
    return 1 if result or accepted is False else 0


def text_of(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).expanduser().read_bytes()
        return data.decode()
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.", exit_code=USAGE) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{file} is not UTF-8 text.", exit_code=USAGE) from error


def accepts(schema: str, text: str) -> bool:
    from dragoman.constrain.constraint import Constraint

    return Constraint.from_json_schema(schema).accepts(text)


def show(file: str, result: list[tuple[str, str]], accepted: bool | None) -> None:
    paint = Colorizer(sys.stdout)
    if not result:
        print(f"{paint('green', 'enforceable')}  every word of {file} is enforced")
    for name, message in result:
        print(f"{paint('red', name)} {message}")
    if accepted is not None:
        print("the text is accepted" if accepted else paint("red", "the text is not accepted"))
