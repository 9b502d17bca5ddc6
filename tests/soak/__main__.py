"""`python -m tests.soak`: people at a real server with the real default model, one runner after the other."""

import argparse
import sys
import time
from importlib.util import find_spec

from bench import machine

from tests.soak.run import Options, soak
from tests.soak.server import TORCH

RUNNERS = ("openvino", "llamacpp", "torch")


def main(arguments: list[str] | None = None) -> int:
    texts = sys.argv[1:] if arguments is None else arguments
    own, flags = (
        (texts[: texts.index("--")], texts[texts.index("--") + 1 :]) if "--" in texts else (texts, [])
    )
    args = _read(own)
    held = True
    for runner in args.runners:
        print(
            f"soak of {runner}: {args.minutes:g} minutes, seed {args.seed}; {machine.describe()}", flush=True
        )
        held &= soak(runner, Options(args.minutes, args.seed, args.requests, flags))
    return 0 if held else 1


def _read(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        epilog="What comes after -- goes to `dragoman serve`: -- --threads 1",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="for each runner [default: 5]")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**32, help="[default: another each time]"
    )
    parser.add_argument(
        "--runners", nargs="+", choices=RUNNERS, default=RUNNERS[:2], help="[default: openvino llamacpp]"
    )
    parser.add_argument("--requests", type=int, default=1_000_000, help="at most so many [default: 1000000]")
    args = parser.parse_args(arguments)
    if "torch" in args.runners and not TORCH.is_dir() and find_spec("torch") is None:
        parser.error("there is no torch in build/torch: run `make build/torch`")
    if "openvino" in args.runners and find_spec("openvino") is None:
        parser.error("openvino is not installed: leave it out of --runners")
    return args


if __name__ == "__main__":
    sys.exit(main())
