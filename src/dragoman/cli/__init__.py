"""The command line. One file per command, each with `SUMMARY`, `add(parser)` and `run(args)`.

Modules of this package import heavy modules inside the functions that need them, so that `--help` is
instant.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from dragoman import logs
from dragoman._version import __version__
from dragoman.cli.exits import INTERRUPTED, USAGE, CommandError, StoppedBySignal, drop_stdout, leave, report
from dragoman.cli.parser import SETTING, CommandParser, nearest
from dragoman.errors import DragomanError

__all__ = ["main"]

COMMANDS = (
    *("serve", "chat", "models", "pull", "list", "show", "rm", "ps"),
    *("dialects", "parse", "check-schema", "mcp", "store", "export"),
    *("batch", "keys", "replay", "doctor", "bench", "completion"),
)
MODULES = {"list": "list_models"}
"""Modules of commands whose names are also Python builtins."""

EXAMPLE = """\
examples:
  dragoman serve                      serve the default model on http://127.0.0.1:8000
  dragoman serve model.gguf           serve your own model
  dragoman chat "What is a dragoman?" ask once
  dragoman chat                       start a conversation
  dragoman parse --dialect hermes f   parse a model's raw output into text, reasoning and tool calls
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Without `argv`, the process is the command's own and may end
    here.
    """
    code = _obey(sys.argv[1:] if argv is None else list(argv), owns_process=argv is None)
    if argv is None:
        leave(code)
    return code


def _obey(arguments: list[str], owns_process: bool) -> int:
    debug = os.environ.get("DRAGOMAN_LOG_LEVEL") == "debug"
    if owns_process and _wants_json(arguments):
        # Before anything can fail, so that errors are JSON lines as well.
        logs.stdio_as_json()
    try:
        args = read(arguments)
        args.owns_process = owns_process
        debug = getattr(args, SETTING + "log_level", "debug" if debug else "") == "debug"
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except StoppedBySignal:
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        drop_stdout()
        return 0
    except DragomanError as error:
        return report(error, debug=debug)


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether a server's output is JSON, as far as flags and environment tell before the settings are
    loaded.
    """
    if arguments[:1] != ["serve"] or "--no-log-json" in arguments:
        return False
    return "--log-json" in arguments or os.environ.get("DRAGOMAN_LOG_JSON", "").lower() in ("true", "1")


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments: `read(["serve", "--prot", "1"])` raises: no flag --prot. Did you mean --port?"""
    parser, commands = build()
    if not arguments:
        parser.print_help()
        raise SystemExit(0)
    if not arguments[0].startswith("-") and arguments[0] not in commands:
        near = nearest(arguments[0], commands)
        hint = f"Did you mean `dragoman {near}`?" if near else f"There are {', '.join(commands)}."
        raise CommandError(f"There is no command {arguments[0]}.", hint, exit_code=USAGE)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.get(arguments[0], parser).refuse(unknown)
    return args


def build() -> tuple[CommandParser, dict[str, CommandParser]]:
    """Build the parser, and the parsers of its commands by name."""
    parser = CommandParser(
        prog="dragoman",
        description="Serve language models over the OpenAI API.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dragoman {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands: dict[str, CommandParser] = {}
    for name in COMMANDS:
        module = importlib.import_module(f"dragoman.cli.{MODULES.get(name, name.replace('-', '_'))}")
        commands[name] = subparsers.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            epilog=module.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add(commands[name])
        commands[name].set_defaults(run=module.run)
    return parser, commands
