"""The flags that measurements of a real model share."""

import argparse
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.weights import default_model

S = TypeVar("S", bound=Struct)


def parser(name: str, description: str | None, rounds: int, *, peers: bool = True) -> argparse.ArgumentParser:
    """Where there are peers, one can ask for some of them only."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    made.add_argument("--model", metavar="FILE", type=Path, help="a GGUF file [default: the default weights]")
    made.add_argument("--rounds", type=int, help=f"how often each is measured [default: {rounds}]")
    made.add_argument("--threads", type=int, default=2, help="compute threads [default: 2]")
    made.add_argument("--quick", action="store_true", help="a short run, for a first look")
    if peers:
        made.add_argument(
            "--only", action="append", default=[], metavar="NAME", help="measure only this server"
        )
    return made


def read(made: argparse.ArgumentParser, full: S, quick: S) -> tuple[argparse.Namespace, S]:
    """All flags, and the options with what was given for them."""
    args = made.parse_args()
    args.model = args.model or default_model()
    base = quick if args.quick else full
    given = {name: getattr(args, name, None) for name in base.__struct_fields__}
    return args, replace(base, **{name: value for name, value in given.items() if value is not None})
