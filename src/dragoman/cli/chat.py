"""Chat with a model in the terminal: on a running server, or loaded in this process."""

import argparse
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.cli.exits import INTERRUPTED, USAGE, CommandError
from dragoman.cli.parser import add_connection, read_settings
from dragoman.logs import Colorizer

if TYPE_CHECKING:
    from dragoman.cli.chat_session import ChatSession
    from dragoman.client import Client
    from dragoman.settings import Settings

LONGEST = 2048
SUMMARY = "chat with a model in the terminal"
EXAMPLE = """\
examples:
  dragoman chat
  dragoman chat "What is a dragoman?" --max-tokens 100
  cat notes.txt | dragoman chat "Sum this up" --system "Be brief."
  dragoman chat --url http://127.0.0.1:9000
  dragoman chat --model ./model.gguf

Without --url, a dragoman on the default port is used if one answers there; otherwise the model is loaded in
this process. In the chat, /help lists the commands; Ctrl-C stops an answer, /bye or Ctrl-D leaves. A paste is
one message, and so are lines between three quotes. Typed lines are kept as history for the next chat.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "question", metavar="QUESTION", nargs="*", help="question to ask once, without a chat"
    )
    add_connection(parser)
    parser.add_argument("--config", metavar="FILE", help="settings file for a model loaded in this process")
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="model of the server [default: its first], or a GGUF file to load",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        help="sampling temperature; 0 is greedy, 1 the model's own distribution [default: the server's]",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help=f"maximum tokens of an answer [default: {LONGEST}, or half of a short context; 0: the server's]",
    )
    parser.add_argument(
        "--no-history", action="store_true", help="neither read nor write the history of typed lines"
    )


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.chat_session import ChatSession

    question = _question(args.question)
    with _client(args) as client:
        model = _model(args, client)
        fields: dict[str, Any] = {"model": model["id"]}
        fields |= {} if args.temperature is None else {"temperature": args.temperature}
        longest = _longest(model) if args.max_tokens is None else args.max_tokens
        fields |= {"max_tokens": longest} if longest else {}
        talk = ChatSession(client, fields, args.system)
        return _once(talk, question) if question is not None else _talk(talk, not args.no_history)


def _longest(model: dict[str, Any]) -> int:
    """Return the default `max_tokens`: answers end eventually, and half of the context stays for the
    question.
    """
    context = model.get("max_model_len")
    return min(LONGEST, context // 2) if isinstance(context, int) and context > 1 else LONGEST


def _question(words: list[str]) -> tuple[str, str] | None:
    """Return the question to ask once, from the arguments and piped input; None starts a chat."""
    piped = ""
    if not sys.stdin.isatty() and (not words or _is_piped()):
        piped = sys.stdin.read().strip()
        if not words and not piped:
            raise CommandError("No question given.", 'Try `dragoman chat "hello"`.', exit_code=USAGE)
    return (" ".join(words), piped) if words or piped else None


def _is_piped() -> bool:
    """Whether stdin is a pipe or a file; reading any other stdin without a writer would never end."""
    with suppress(OSError, ValueError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False


def _once(talk: "ChatSession", question: tuple[str, str]) -> int:
    from dragoman.cli.chat_session import advice, figures

    answer = talk.ask(*question)
    print()
    paint = Colorizer(sys.stderr)
    for text in (
        figures(answer) if paint.on else "",
        advice(answer, talk.fields, "--max-tokens N asks for more."),
    ):
        if text:
            print(paint("dim", text), file=sys.stderr)
    return INTERRUPTED if answer.stopped else 0


def _talk(talk: "ChatSession", remembers: bool) -> int:
    from dragoman.cli.line_input import InputHistory, edit_lines
    from dragoman.store import default_folder

    talk.reader.memory = InputHistory(default_folder() / "chat_history") if remembers else None
    edit_lines(talk.reader, talk.complete)
    paint = Colorizer(sys.stdout)
    print(paint("dim", f"{talk.fields['model']} at {talk.client.url}   /help for commands, /bye to leave"))
    return talk.chat()


def _is_file(model: str | None) -> bool:
    return model is not None and (model.endswith(".gguf") or Path(model).is_file())


def _model(args: argparse.Namespace, client: "Client") -> dict[str, Any]:
    """Return the server's entry for the chosen model; for an unlisted one, its name alone."""
    from dragoman.cli.address import first_model

    if args.model is None or _is_file(args.model):
        return first_model(client)
    listed = {str(model["id"]): model for model in client.models()}
    return listed.get(args.model, {"id": args.model})


@contextmanager
def _client(args: argparse.Namespace) -> Iterator["Client"]:
    """Yield a client of the chosen server, which may live only as long as this command."""
    from dragoman.cli.address import is_dragoman, key_of, own_url
    from dragoman.client import Client
    from dragoman.http.keys import keys_of

    settings = read_settings(args, model=args.model if _is_file(args.model) else None)
    usual = own_url(settings)
    # OpenAI's key is sent only to a URL that the user named: any program may listen on the default port.
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

    # Only this process uses the server, and access log lines would interrupt the chat.
    settings = msgspec.structs.replace(
        settings,
        host="127.0.0.1",
        port=0,
        api_key=[],
        api_key_file=None,
        uds=None,
        tls_cert=None,
        root_path="",
        admin_key=[],
        admin_key_file=None,
        slots=settings.slots or 1,
        shutdown_grace=1,
    )
    if sys.stderr.isatty():
        print(
            Colorizer(sys.stderr)("dim", "No server is running: loading the model in this process."),
            file=sys.stderr,
        )
    logs.setup("error" if settings.log_level != "debug" else "debug", settings.log_json)
    with background(engine_of(settings), settings) as url:
        yield url
