"""The flags that measurements of a real model share."""

import argparse
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.default_weights import default_model

S = TypeVar("S", bound=Struct)


def parser(name: str, description: str | None, rounds: int, *, peers: bool = True) -> argparse.ArgumentParser:
    """Where there are peers, one can ask for some of them only."""
    argument_parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    argument_parser.add_argument(
        "--model", metavar="FILE", type=Path, help="a GGUF file [default: the default weights]"
    )
    argument_parser.add_argument("--rounds", type=int, help=f"how often each is measured [default: {rounds}]")
    argument_parser.add_argument("--threads", type=int, default=2, help="compute threads [default: 2]")
    argument_parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    if peers:
        argument_parser.add_argument(
            "--only", action="append", default=[], metavar="NAME", help="measure only this server"
        )
    return argument_parser


def read(argument_parser: argparse.ArgumentParser, full: S, quick: S) -> tuple[argparse.Namespace, S]:
    """All flags, and the options with what was given for them."""
    args = argument_parser.parse_args()
    args.model = args.model or default_model()
    base = quick if args.quick else full
    fields = {name: getattr(args, name, None) for name in base.__struct_fields__}
    return args, replace(base, **{name: value for name, value in fields.items() if value is not None})
