"""Talk with a model in the terminal: with a running server, or with a model loaded for the occasion."""

import argparse
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.cli.parser import add_connection, read_settings
from dragoman.cli.problems import INTERRUPTED, USAGE, CommandError
from dragoman.logs import Paint

if TYPE_CHECKING:
    from dragoman.client import Client
    from dragoman.settings import Settings

SUMMARY = "talk with a model in the terminal"
EXAMPLE = """\
examples:
  dragoman chat
  dragoman chat "What is a dragoman?" --max-tokens 100
  cat notes.txt | dragoman chat "Sum this up" --system "Be brief."
  dragoman chat --url http://127.0.0.1:9000
  dragoman chat --model ./model.gguf

Without --url, a dragoman on the usual port is used if one answers there; otherwise the model is loaded in
this process. While talking, /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", metavar="QUESTION", nargs="*", help="ask this once, and leave")
    add_connection(parser)
    parser.add_argument("--config", metavar="FILE", help="the settings of a model that is loaded here")
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="the server's model to ask [default: its first], or a GGUF file to load",
    )
    parser.add_argument("--system", metavar="TEXT", help="how the model should behave")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0 is exact, 1 the model's own [default: the server's]"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="the longest answer [default: the server's]"
    )


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.talk import Talk

    question = _question(args.question)
    with _client(args) as client:
        fields: dict[str, Any] = {"model": _model(args, client)}
        fields |= {k: v for k in ("temperature", "max_tokens") if (v := getattr(args, k)) is not None}
        talk = Talk(client, fields, args.system)
        return _once(talk, question) if question is not None else _talk(talk, fields["model"])


def _question(words: list[str]) -> str | None:
    """What to ask once: the arguments, what is piped in, or both; None means a conversation."""
    piped = ""
    if not sys.stdin.isatty() and (not words or _is_piped()):
        piped = sys.stdin.read().strip()
        if not words and not piped:
            raise CommandError("There is no question.", 'Try `dragoman chat "hello"`.', exit_code=USAGE)
    parts = [part for part in (" ".join(words), piped) if part]
    return "\n\n".join(parts) if parts else None


def _is_piped() -> bool:
    """Whether something was put there for us: reading a stdin that nobody writes to would never end."""
    with suppress(OSError, ValueError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False


def _once(talk: Any, question: str) -> int:
    from dragoman.cli.talk import figures

    answer = talk.ask(question)
    print()
    paint = Paint(sys.stderr)
    if paint.on:
        print(paint("dim", figures(answer)), file=sys.stderr)
    return INTERRUPTED if answer.stopped else 0


def _talk(talk: Any, model: str) -> int:
    with suppress(ImportError):
        # Importing it is what gives input() its line editing.
        import readline  # noqa: F401
    paint = Paint(sys.stdout)
    print(paint("dim", f"{model} at {talk.client.url}   /help for commands, Ctrl-D to leave"))
    code: int = talk.chat()
    return code


def _is_file(model: str | None) -> bool:
    return model is not None and (model.endswith(".gguf") or Path(model).is_file())


def _model(args: argparse.Namespace, client: "Client") -> str:
    from dragoman.cli.address import first_model

    return first_model(client) if args.model is None or _is_file(args.model) else str(args.model)


@contextmanager
def _client(args: argparse.Namespace) -> Iterator["Client"]:
    """A client of the server that is meant, which may be one that lives only as long as this command."""
    from dragoman.cli.address import host_in_url, is_dragoman, key_of
    from dragoman.client import Client
    from dragoman.http.keys import keys_of

    settings = read_settings(args, model=args.model if _is_file(args.model) else None)
    usual = f"http://{host_in_url(settings.host)}:{settings.port}"
    # OpenAI's key goes only where the person points: anybody may sit on the usual port.
    key = key_of(args.api_key) if args.url else args.api_key or next(iter(keys_of(settings)), None)
    if args.url is None and not _is_file(args.model) and is_dragoman(usual, key):
        args.url = usual
    if args.url is not None:
        with Client(args.url, key) as client:
            yield client
        return
    with _own_server(settings) as url, Client(url) as client:
        yield client


@contextmanager
def _own_server(settings: "Settings") -> Iterator[str]:
    import msgspec

    from dragoman import logs
    from dragoman.cli.engine import engine_of
    from dragoman.http.server import background

    # Nobody else can reach it, and lines about requests would stand in the middle of the talk.
    settings = msgspec.structs.replace(
        settings,
        host="127.0.0.1",
        port=0,
        api_key=[],
        api_key_file=None,
        admin_key=[],
        admin_key_file=None,
        slots=settings.slots or 1,
        shutdown_grace=1,
    )
    logs.setup("error" if settings.log_level != "debug" else "debug", settings.log_json)
    with background(engine_of(settings), settings) as url:
        yield url
