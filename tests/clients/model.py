"""A model that knows a few questions, behind a template as strict as those of real models."""

import json
import re
from collections.abc import Callable

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.types import Job
from tests.clients import cases
from tests.support.parrot import TEMPLATE, call
from tests.support.tool_model import prompt_of

STRICT = (
    """\
{%- if not messages | selectattr("role", "equalto", "user") | list %}
{{- raise_exception("No user query found in messages.") }}{% endif -%}
"""
    + TEMPLATE
)
THINKING = f"<think>\n{cases.THOUGHT}\n</think>\n\n"
SHELLS = {
    "exec_command": "cmd",
    "bash": "command",
    "Bash": "command",
    "run_shell_command": "command",
    "run_commands": "commands",
}
"""Tools of coding agents that run a command, and what they call it."""


def _offered(prompt: str) -> list[str]:
    """The names of the tools that the prompt offers, each once on a line of its own."""
    return re.findall(r'^\{.*?"name": "([^"]+)"', prompt, re.MULTILINE)


def _ask_for_weather(prompt: str) -> str:
    [name, *_] = [name for name in _offered(prompt) if "weather" in name] or ["weather"]
    return THINKING + call(name, city="Paris")


def _tell_weather(prompt: str) -> str:
    # Agents that want their last word as a call have a tool for it.
    return call("final_answer", answer=cases.WARM) if "final_answer" in _offered(prompt) else cases.WARM


def _run_a_command(prompt: str) -> str:
    [name, *_] = [name for name in _offered(prompt) if name in SHELLS] or ["bash"]
    command: dict[str, object] = {SHELLS[name]: f"echo {cases.FILE} > out.txt; echo written by a tool"}
    return THINKING + call(name, **command, **({"description": "writes"} if name == "bash" else {}))


ANSWERS: dict[str, Callable[[str], str]] = {
    cases.NAME_A_COLOUR: lambda _: cases.COLOUR,
    cases.THINK_OF_A_COLOUR: lambda _: THINKING + cases.COLOUR,
    cases.HOW_WARM: _ask_for_weather,
    cases.RESULT: _tell_weather,
    cases.WHICH_CITY: lambda _: json.dumps(cases.CITY),
    cases.WRITE_A_FILE: _run_a_command,
    "written by a tool\n": lambda _: cases.WRITTEN,
}


def said(job: Job) -> Script:
    """Whichever of the questions and results that it knows stands last in the prompt."""
    prompt = prompt_of(job)
    last = max(ANSWERS, key=prompt.rfind)
    return say(ANSWERS[last](prompt) if last in prompt else cases.COLOUR)


def model(*, constrains: bool = True) -> ScriptedEngine:
    """It keeps to what it is asked by itself, or is an engine that cannot be held to anything."""
    card = ModelCard(
        name=cases.MODEL, max_model_len=200_000, templates={"default": STRICT}, constrains=constrains
    )
    return ScriptedEngine(said, card=card)
