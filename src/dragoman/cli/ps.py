"""List the models that a running server has loaded."""

import argparse

SUMMARY = "list the models being served"
EXAMPLE = """\
examples:
  dragoman ps
  dragoman ps --url http://127.0.0.1:9000
"""


def add(parser: argparse.ArgumentParser) -> None:
    from dragoman.cli.parser import add_connection

    add_connection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.models import print_json, print_models, running_models

    url, models = running_models(args.url, args.api_key)
    if args.json:
        print_json({"url": url, "models": models})
    elif models:
        print_models(models)
    else:
        print(f"No server at {url}; `dragoman serve` starts one.")
    return 0
