"""Look for what could keep a server from running, and say what to do about it."""

import argparse

SUMMARY = "check this machine, the installation and the model"
EXAMPLE = """\
examples:
  dragoman doctor
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    return 0
