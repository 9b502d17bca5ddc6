"""A scripted model that calls tools, for exact runs of a tool loop."""

from collections.abc import Callable

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import Script, ScriptedEngine
from dragoman.types import Job
from tests.support.parrot import TEMPLATE, call

__all__ = ["call", "prompt_of", "tool_model"]

NAME = "scripted"


def prompt_of(job: Job) -> str:
    """What the model was shown, without control tokens."""
    return bytes(id_ for id_ in job.prompt if id_ < 256).decode()


def tool_model(answer: Callable[[Job], Script], *, context: int = 4096) -> ScriptedEngine:
    # Scripts keep to what they are asked by themselves.
    card = ModelCard(name=NAME, max_model_len=context, templates={"default": TEMPLATE}, constrains=True)
    return ScriptedEngine(answer, card=card)
