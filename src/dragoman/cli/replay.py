"""Send a saved failed request again, and show what differs from the first time."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.cli.exits import FAILED
from dragoman.cli.parser import add_connection
from dragoman.cli.terminal import visible
from dragoman.logs import Colorizer

if TYPE_CHECKING:
    from dragoman.client import Client
    from dragoman.client.replay import RequestOutcome, SavedFailure

SUMMARY = "send a saved request again and show the difference"
EXAMPLE = """\
examples:
  dragoman replay failures/20260101-120000-1a2b3c4d.json
  dragoman replay FILE --url http://127.0.0.1:8000

`dragoman.Client(..., failures="failures")` saves failed requests in that folder, without keys. Without --url
the request goes to its first server, and only with a key from --api-key: the file may be someone else's.
"""
STYLES = {"+": "green", "-": "red", "@": "dim"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="saved request")
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.address import key_of
    from dragoman.client import Client
    from dragoman.client.replay import difference, load, tell_outcome

    failure = load(args.file.expanduser())
    url, key = (args.url, key_of(args.api_key)) if args.url else (failure.url, args.api_key)
    paint = Colorizer(sys.stdout)
    with Client(url, key, retries=0) as client:
        print(paint("dim", visible(f"POST {client.url}{failure.path}, saved {failure.at}")))
        now = _replay(failure, client)
    lines = difference(failure.outcome, now)
    for line in lines:
        style = STYLES.get(line[0])
        print(paint(style, visible(line)) if style else visible(line))
    if not lines:
        print("No difference; the outcome is again:")
        print(visible("\n".join(tell_outcome(now))))
    return FAILED if now.error else 0


def _replay(failure: "SavedFailure", client: "Client") -> "RequestOutcome":
    """Send the request and return its outcome; a failure is an outcome, too."""
    from dragoman.client import ClientError
    from dragoman.client.request import Request

    stream = client.stream(Request(failure.path, failure.body))
    try:
        for _ in stream:
            pass
    except ClientError as error:
        return stream.outcome(error)
    return stream.outcome()
