"""The engine's process: `python -m dragoman.cli.isolated LINK LIFELINE`, started only by the server.

The settings come over the socket, so that no key shows in the list of processes.
"""

import socket
import sys

import msgspec

from dragoman import logs
from dragoman.cli.engine import engine_of
from dragoman.engines.isolated import child, wire
from dragoman.engines.isolated.engine import die_with_parent
from dragoman.settings import Settings


def main() -> int:
    link, lifeline = (int(number) for number in sys.argv[1:3])
    child.ignore_stop_signals()
    die_with_parent(lifeline)
    with socket.socket(fileno=link) as connection:
        settings = msgspec.msgpack.decode(wire.receive(connection), type=Settings)
        if settings.log_json:
            logs.stdio_as_json()
        logs.setup(settings.log_level, settings.log_json)
        return child.serve(connection, lambda: engine_of(settings))


if __name__ == "__main__":
    sys.exit(main())
