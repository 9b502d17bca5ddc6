"""A server of its own process, for tests that kill it: `python -m tests.support.scripted_server FOLDER`.

It says "Hello" to everybody, keeps what it is asked to keep in that folder, and prints its address. With
"parrot" behind the folder it says what it is told.
"""

import sys

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import serve
from tests.support.parrot import parrot


def ready(url: str) -> None:
    print(url, flush=True)


if __name__ == "__main__":
    engine = parrot() if "parrot" in sys.argv[2:] else ScriptedEngine(say("Hello"))
    serve(engine, port=0, store="sqlite", data_dir=sys.argv[1], on_ready=ready)
