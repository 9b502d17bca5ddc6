"""Create, list and revoke the keys of a key file. A running server applies changes without a restart."""

import argparse
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dragoman.cli.exits import USAGE, CommandError
from dragoman.cli.parser import SETTING, positive, read_settings
from dragoman.cli.terminal import table
from dragoman.logs import Colorizer

if TYPE_CHECKING:
    from dragoman.http.key_file import ApiKey

SUMMARY = "create, list and revoke API keys"
EXAMPLE = """\
examples:
  export DRAGOMAN_API_KEY_FILE=/etc/dragoman/keys
  dragoman keys add ci                                   print a new key; the file stores only its hash
  dragoman keys add anna --model 'qwen*' --tokens-per-minute 20000 --tokens-per-day 1000000
  dragoman keys add ops --admin                          may load, unload and pull models
  dragoman keys list
  dragoman keys revoke ci                                its next request gets a 401

The key is printed once and cannot be recovered. Without --model it may use every model. --stdin reads your
own key from standard input. docs/security.md describes the file.
"""
HEAD = ("name", "key", "made", "models", "tokens/minute", "tokens/day")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "revoke"), help="action")
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="name of the key; for revoke also the first digits of its hash",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        action="append",
        default=[],
        help="add: model that the key may use, * as a wildcard; may be given several times [default: all]",
    )
    parser.add_argument(
        "--admin", action="store_true", help="add: allow the key to load, unload and pull models"
    )
    for what in ("minute", "day"):
        parser.add_argument(
            f"--tokens-per-{what}",
            metavar="N",
            type=positive,
            help=f"add: tokens per {what}, of prompts and answers [default: no limit]",
        )
    parser.add_argument("--stdin", action="store_true", help="add: read the key from standard input")
    parser.add_argument("--json", action="store_true", help="list: print JSON")
    parser.add_argument("--config", metavar="FILE", help="settings file of the server")
    parser.add_argument(
        "--api-key-file",
        dest=SETTING + "api_key_file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="file of keys [default: the server's setting; env: DRAGOMAN_API_KEY_FILE]",
    )


def run(args: argparse.Namespace) -> int:
    file = read_settings(args).api_key_file
    if file is None:
        raise CommandError(
            "No key file is configured.",
            "Set --api-key-file or DRAGOMAN_API_KEY_FILE, here and for the server.",
            exit_code=USAGE,
        )
    if args.action == "list":
        _list(file, as_json=args.json)
    elif not args.name:
        raise CommandError(f"`dragoman keys {args.action}` takes a name.", exit_code=USAGE)
    elif args.action == "add":
        _add(file, args)
    else:
        _revoke(file, args.name)
    return 0


def _add(file: str, args: argparse.Namespace) -> None:
    import msgspec

    from dragoman.http.key_file import SHORTEST, add_key, check_key, describe_key, new_key

    key = check_key(sys.stdin.readline().strip()) if args.stdin else new_key()
    if len(key) < SHORTEST:
        message = f"A key has at least {SHORTEST} characters: a shorter one could be guessed from its hash."
        raise CommandError(message, "Without --stdin a strong key is generated.", exit_code=USAGE)
    budgets = {"tokens_per_minute": args.tokens_per_minute, "tokens_per_day": args.tokens_per_day}
    created = f"{datetime.now(UTC):%Y-%m-%d}"
    try:
        api_key = describe_key(
            key, name=args.name, created=created, admin=args.admin, models=args.model, **budgets
        )
    except msgspec.ValidationError as error:
        raise CommandError(f"The key is not valid: {error}.", exit_code=USAGE) from error
    add_key(file, api_key)
    kept = "" if args.stdin else " Keep the key: it is not shown again."
    print(f"{args.name} is in {file}, as a hash.{kept}", file=sys.stderr)
    if not args.stdin:
        print(key)


def _list(file: str, *, as_json: bool) -> None:
    from dragoman.cli.models import print_json
    from dragoman.http.key_file import read_key_file

    keys = read_key_file(file)
    if as_json:
        print_json(keys)
    else:
        print(table(HEAD, map(_row, keys), Colorizer(sys.stdout)))


def _row(key: "ApiKey") -> tuple[str, ...]:
    models = "all, admin" if key.admin else ", ".join(key.models) or "all"
    # A key in plain text has no name; it can be revoked by its hash.
    shown = f"{key.begins}…" if key.name else f"(plain) {key.sha256[:8]}"
    budgets = (str(each or "-") for each in (key.tokens_per_minute, key.tokens_per_day))
    return key.name or "-", shown, key.created or "-", models, *budgets


def _revoke(file: str, name: str) -> None:
    from dragoman.http.key_file import revoke_key

    for key in revoke_key(file, name):
        print(
            f"{key.name or key.sha256[:8]} is revoked. Its stored data stays, and no other key can read it."
        )
