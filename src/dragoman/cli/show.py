"""Show the quantizations of a model on a hub, their sizes, and which one fits in memory."""

import argparse
import sys

SUMMARY = "show the quantizations of a model on a hub"
EXAMPLE = """\
examples:
  dragoman show hf:org/repo
  dragoman models model.gguf      contents of a file
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="hf:ORG/REPO, ORG/REPO, or a link to it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.models import print_json
    from dragoman.cli.pull import name_of
    from dragoman.cli.terminal import size, table
    from dragoman.engines.local import hardware
    from dragoman.hub import ROOM, ModelName
    from dragoman.hub.cache import find_cached
    from dragoman.hub.http_client import list_files
    from dragoman.hub.names import list_variants
    from dragoman.logs import Colorizer

    name, room = name_of(args.model), int(ROOM * hardware.free_memory())
    variants = list_variants(list_files(name).files)
    here = [
        find_cached(ModelName(name.repo, each.first.name, name.revision)) is not None for each in variants
    ]
    if args.json:
        result = zip(variants, here, strict=True)
        print_json([{"label": each.label, "bytes": each.size, "here": there} for each, there in result])
        return 0
    rows = [
        (each.label, size(each.size), "yes" if there else "", "yes" if each.size <= room else "no")
        for each, there in zip(variants, here, strict=True)
    ]
    print(table((name.repo, "size", "here", f"fits into {size(room)}"), rows, Colorizer(sys.stdout)))
    return 0
