"""Delete a model from Hugging Face's cache. What other models have in common with it stays."""

import argparse

from dragoman.cli.problems import CommandError

SUMMARY = "delete a model that was fetched"
EXAMPLE = """\
examples:
  dragoman rm hf:org/repo:Q4_K_M
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="as `dragoman list` shows it")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.pull import name_of
    from dragoman.cli.terminal import size
    from dragoman.hub.cache import find_cached, list_cached, remove

    name = name_of(args.model)
    model = find_cached(name)
    if model is None:
        raise CommandError(f"{name} is not on this machine.", "`dragoman list` shows what is.")
    others = [each for each in list_cached() if each.name.repo == name.repo]
    if not name.choice and len(others) > 1:
        there = ", ".join(str(each.name) for each in others)
        raise CommandError(f"There are several of {name.repo}.", f"Name one: {there}.")
    print(f"{model.name} is deleted; {size(remove(model))} are free.")
    return 0
