"""The engine of the replicas in tests: what it says is known, and how fast."""

import os

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, Script, ScriptedEngine, say
from dragoman.settings import Settings
from dragoman.types import Job

WORDS = 40


def make(settings: Settings) -> ScriptedEngine:
    """Says its process, and then letters at the pace of `engine_args`: more if asked for long ones."""
    options = {"interval": 0.02, "tokens": WORDS, **settings.engine_args}

    def answer(job: Job) -> Script:
        is_long = b"long" in bytes(id_ for id_ in job.prompt if id_ < 256)
        return say(f"{os.getpid()} " + "x" * int(options["tokens"]) * (50 if is_long else 1))

    name = settings.model_name or "scripted"
    card = ModelCard(name=name, max_model_len=4096, slots=64, templates={"default": CHATML})
    return ScriptedEngine(answer, interval=options["interval"], card=card)
