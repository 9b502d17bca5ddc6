"""All measurements, one after the other: `python -m bench`, or `--quick` for a first look."""

import argparse
import sys
import time

from msgspec.structs import replace

import bench
from bench import constrain, flat, machine, parse, responses, serve, step, stream
from bench.errors import told
from bench.peers import Setup
from bench.tables import OUT
from dragoman.engines.default_weights import default_model


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="short runs, for a first look")
    parser.add_argument("--plots", metavar="DIR", help="folder for the plots [default: bench/out]")
    args = parser.parse_args()
    began = time.monotonic()
    print(machine.describe(), flush=True)
    stream.main(stream.QUICK if args.quick else stream.Options(), args.plots)
    responses.main(responses.QUICK if args.quick else responses.Options())
    parsing = parse.QUICK if args.quick else parse.Options()
    parse.main(replace(parsing, pythons=parse.pythons_of()), args.plots)
    setup = Setup(default_model())
    constrain.main(setup, constrain.QUICK if args.quick else constrain.Options())
    serve.main(setup, serve.QUICK if args.quick else serve.Options(), args.plots)
    flat.main(setup.model, setup.threads, flat.QUICK if args.quick else flat.Options())
    step.main(setup.model, setup.threads, step.QUICK if args.quick else step.Options())
    print(f"\n{time.monotonic() - began:.0f} seconds; tables and figures are in {OUT}")


if __name__ == "__main__":
    sys.exit(told(cli))
