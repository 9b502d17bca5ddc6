"""Delete a model from Hugging Face's cache. Files that other models share stay."""

import argparse

from dragoman.cli.exits import CommandError

SUMMARY = "delete a downloaded model"
EXAMPLE = """\
examples:
  dragoman rm hf:org/repo:Q4_K_M
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="name as in `dragoman list`")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.pull import name_of
    from dragoman.cli.terminal import size
    from dragoman.hub.cache import find_cached, list_cached, remove

    name = name_of(args.model)
    model = find_cached(name)
    if model is None:
        raise CommandError(f"{name} is not on this machine.", "`dragoman list` lists the models.")
    others = [each for each in list_cached() if each.name.repo == name.repo]
    if not name.selector and len(others) > 1:
        there = ", ".join(str(each.name) for each in others)
        raise CommandError(f"There are several models of {name.repo}.", f"Name one: {there}.")
    print(f"{model.name} is deleted; {size(remove(model))} freed.")
    return 0
