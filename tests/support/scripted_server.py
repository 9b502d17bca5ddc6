"""A server of its own process, for tests that kill it: `python -m tests.support.scripted_server FOLDER`.

It says "Hello" to everybody, keeps what it is asked to keep in that folder, and prints its address. With
"parrot" behind the folder it says what it is told, with "slow-parrot" slowly; with "one-id" it samples
"Hello" as a single id.
"""

import sys

from dragoman.engines.scripted import END_ID, ByteTokenizer, Script, ScriptedEngine, say
from dragoman.http.server import serve
from tests.support.parrot import parrot

HELLO_ID = END_ID + 1


def one_id() -> ScriptedEngine:
    """Its tokenizer would not write "Hello" so: ids that were not kept are seen."""
    return ScriptedEngine(Script([HELLO_ID, END_ID]), tokenizer=ByteTokenizer(["Hello"]))


def slow_parrot() -> ScriptedEngine:
    """Slow enough to be killed at work, with few answers at a time."""
    scripted_engine = parrot(interval=0.002)
    scripted_engine.card.slots = 4
    return scripted_engine


ENGINES = {"parrot": parrot, "one-id": one_id, "slow-parrot": slow_parrot}


def ready(url: str) -> None:
    print(url, flush=True)


if __name__ == "__main__":
    engine = ENGINES[sys.argv[2]]() if sys.argv[2:] else ScriptedEngine(say("Hello"))
    serve(engine, port=0, store="sqlite", data_dir=sys.argv[1], on_ready=ready)
