"""An engine that puts what it was asked into the exceptions that it raises, for `--engine MODULE:OBJECT`."""

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.types import Job

BREAK = b"break"


def _script(job: Job) -> Script:
    asked = bytes(id_ for id_ in job.prompt if id_ < 256)
    if BREAK in asked:
        raise ValueError(asked.decode("utf-8", "replace"))
    return say("fine")


ENGINE = ScriptedEngine(_script)
