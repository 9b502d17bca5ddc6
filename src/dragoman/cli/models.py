"""List the models of a running server, the weights that are cached, or what a GGUF file holds."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from dragoman.cli.parser import add_connection
from dragoman.cli.terminal import size, table
from dragoman.logs import Paint

SUMMARY = "list a server's models, or look into a GGUF file"
EXAMPLE = """\
examples:
  dragoman models                              what is cached on this machine
  dragoman models --url http://127.0.0.1:8000  what a server offers
  dragoman models model.gguf                   what a file holds
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="a GGUF file to look into")
    add_connection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.file is not None:
        return _file(args.file.expanduser(), args.json)
    if args.url is not None:
        return _server(args)
    return _cache(args.json)


def _file(path: Path, as_json: bool) -> int:
    from dragoman.cli.facts import facts_of, shown

    facts = facts_of(path)
    if as_json:
        _print_json(facts)
        return 0
    paint = Paint(sys.stdout)
    for name, text in shown(facts):
        print(f"{paint('dim', name.ljust(12))}  {text}")
    return 0


def _server(args: argparse.Namespace) -> int:
    from dragoman.cli.address import key_of
    from dragoman.cli.client import Client

    with Client(args.url, key_of(args.api_key)) as client:
        models = client.models()
    if args.json:
        _print_json(models)
    else:
        rows = [(m["id"], str(m.get("max_model_len") or "-"), str(m.get("owned_by") or "-")) for m in models]
        print(table(("model", "context", "owner"), rows, Paint(sys.stdout)))
    return 0


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
