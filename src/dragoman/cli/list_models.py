"""List the models in this machine's Hugging Face cache and Ollama store."""

import argparse
import sys
import time

SUMMARY = "list the models on this machine"
EXAMPLE = """\
examples:
  dragoman list
  dragoman serve hf:org/repo:Q4_K_M     any of them by its name
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--names", action="store_true", help="print only the names, one per line")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.models import print_json
    from dragoman.cli.terminal import size, table
    from dragoman.hub.cache import list_cached
    from dragoman.logs import Colorizer

    models = list_cached()
    if args.json:
        facts = [{"name": str(each.name), "path": str(each.path), "bytes": each.size} for each in models]
        print_json(facts)
        return 0
    if args.names:
        print("".join(f"{each.name}\n" for each in models), end="")
        return 0
    if not models:
        print("No models are cached but the default weights; `dragoman pull hf:ORG/REPO` downloads one.")
        return 0
    rows = [(str(each.name), size(each.size), _ago(each.used)) for each in models]
    print(table(("model", "size", "last used"), rows, Colorizer(sys.stdout)))
    return 0


def _ago(used: float) -> str:
    days = int((time.time() - used) // 86400)
    return "today" if days <= 0 else "yesterday" if days == 1 else f"{days} days ago"
