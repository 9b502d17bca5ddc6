"""Check what could keep a server from running, and suggest remedies. Nothing is changed or downloaded."""

import argparse
import os
import sys
from collections.abc import Iterator

import msgspec

from dragoman.cli.checks import CHECKS, Check, CheckContext, Finding
from dragoman.cli.exits import FAILED, hint_of
from dragoman.cli.parser import add_model_argument, add_settings, model_settings, stray_variables
from dragoman.errors import DragomanError
from dragoman.logs import Colorizer, safe_message
from dragoman.settings import Settings

SUMMARY = "check this machine, the installation and the model"
EXAMPLE = """\
examples:
  dragoman doctor
  dragoman doctor model.gguf --port 9000
  dragoman doctor --full --json
  dragoman doctor --engine module:object

It takes the flags of `dragoman serve` and checks what `serve` would use with them.
"""
MARKS = {"ok": ("green", "✓"), "warning": ("yellow", "!"), "failed": ("red", "✗")}


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dragoman doctor [MODEL] [flags]"
    add_model_argument(parser)
    parser.add_argument("--full", action="store_true", help="also verify the checksum of the weights")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_settings(parser, ("model", "dialect", "server", "engine", "requests", "store"))


def run(args: argparse.Namespace) -> int:
    findings = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json:
            show(finding)
    failed = sum(finding.verdict == "failed" for finding in findings)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        paint = Colorizer(sys.stdout)
        print(paint("red", f"\n{failed} checks failed.") if failed else paint("green", "\nReady to serve."))
    return FAILED if failed else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Check the settings first; if they are invalid, check the rest with the defaults."""
    settings = Settings()
    try:
        settings = model_settings(args)
        yield Finding("settings", "ok", "file, environment and flags are valid")
    except DragomanError as error:
        yield Finding("settings", "failed", error.message, hint_of(error))
    for sentence in stray_variables(os.environ):
        yield Finding("settings", "warning", sentence, "The variable has no effect as it is.")
    patient = CheckContext(settings, full=args.full)
    for check in CHECKS:
        yield from attempt(check, patient)


def attempt(check: Check, patient: CheckContext) -> Iterator[Finding]:
    """Run one check; an unexpected exception becomes a finding, and the next checks still run."""
    try:
        yield from check(patient)
    except DragomanError as error:
        yield Finding(check.__name__, "failed", error.message, hint_of(error))
    except Exception as error:
        advice = "This is unexpected; please report it with the output of `dragoman doctor --json`."
        yield Finding(check.__name__, "failed", f"the check failed: {safe_message(error)}", advice)


def show(finding: Finding) -> None:
    paint = Colorizer(sys.stdout)
    style, mark = MARKS[finding.verdict]
    print(f"{paint(style, mark)} {finding.name.ljust(9)}  {finding.text}", flush=True)
    if finding.advice:
        print(f"  {''.ljust(9)}  {paint('dim', '→ ' + finding.advice)}", flush=True)
