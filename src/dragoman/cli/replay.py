"""Send a request again that a client has saved because it failed, and show what is different now."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.cli.parser import add_connection
from dragoman.cli.problems import FAILED
from dragoman.cli.terminal import visible
from dragoman.logs import Paint

if TYPE_CHECKING:
    from dragoman.client import Client
    from dragoman.client.failures import Failure, Outcome

SUMMARY = "send a saved request again and show the difference"
EXAMPLE = """\
examples:
  dragoman replay failures/20260101-120000-1a2b3c4d.json
  dragoman replay FILE --url http://127.0.0.1:8000

`dragoman.Client(..., failures="failures")` saves the requests that fail there. Keys are not saved. Without
--url the request goes where it went before, and only with a key from --api-key: the file may be a stranger's.
"""
STYLES = {"+": "green", "-": "red", "@": "dim"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a request that a client has saved")
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.address import key_of
    from dragoman.client import Client
    from dragoman.client.failures import difference, load, tell_outcome

    failure = load(args.file.expanduser())
    url, key = (args.url, key_of(args.api_key)) if args.url else (failure.url, args.api_key)
    paint = Paint(sys.stdout)
    with Client(url, key, retries=0) as client:
        print(paint("dim", visible(f"POST {client.url}{failure.path}, saved {failure.at}")))
        now = _replay(failure, client)
    lines = difference(failure.outcome, now)
    for line in lines:
        style = STYLES.get(line[0])
        print(paint(style, visible(line)) if style else visible(line))
    if not lines:
        print("Nothing has changed:")
        print(visible("\n".join(tell_outcome(now))))
    return FAILED if now.error else 0


def _replay(failure: "Failure", client: "Client") -> "Outcome":
    """What comes of the request now; a failure is an outcome too."""
    from dragoman.client import ClientError
    from dragoman.client.request import Request

    stream = client.stream(Request(failure.path, failure.body))
    try:
        for _ in stream:
            pass
    except ClientError as error:
        return stream.outcome(error)
    return stream.outcome()
