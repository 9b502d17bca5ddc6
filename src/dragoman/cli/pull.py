"""Download a model from a hub into Hugging Face's cache, which other programs share."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from dragoman.cli.exits import USAGE, CommandError, stopped_by_signals

if TYPE_CHECKING:
    from dragoman.hub import ModelName

SUMMARY = "download a model by its name"
EXAMPLE = """\
examples:
  dragoman pull hf:org/repo          the best quantization that fits in free memory
  dragoman pull hf:org/repo:Q4_K_M   this quantization
  HF_TOKEN=... dragoman pull hf:org/gated

An interrupted download resumes, and files are verified against the hub's checksums. HF_ENDPOINT sets another
hub, HF_HOME another folder; HF_HUB_OFFLINE=1 turns downloads off.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="hf:ORG/REPO[:QUANT], ORG/REPO, or a link to it")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli.terminal import size
    from dragoman.engines.default_weights import show_progress
    from dragoman.engines.local import hardware
    from dragoman.hub import ROOM, pull

    name = name_of(args.model)
    progress = partial(show_progress, doing=f"downloading {name.repo}", did=f"downloaded {name.repo}")
    with stopped_by_signals():
        model = pull(name, progress, room=int(ROOM * hardware.free_memory()))
    print(f"{model.name}  {size(model.size)}\n{model.path}")
    return 0


def name_of(text: str) -> "ModelName":
    from dragoman.hub import resolve_name

    name = resolve_name(text)
    if name is None:
        hint = "Names look like hf:ORG/REPO or hf:ORG/REPO:Q4_K_M."
        raise CommandError(f"{text} is not a valid model name.", hint, exit_code=USAGE)
    return name
