"""A model that knows a few questions, behind a template as strict as those of real models."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.errors import ConstraintFailed
from dragoman.types import Job, JobConstraint
from tests.clients import cases
from tests.support.parrot import TEMPLATE
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


def call(name: str, /, **arguments: object) -> str:
    """A call as the model writes it: what is no ASCII is not escaped."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


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


JOKE = {"setup": "Why?", "punchline": "Because."}
ANSWERS: dict[str, Callable[[str], str]] = {
    cases.NAME_A_COLOUR: lambda _: cases.COLOUR,
    cases.THINK_OF_A_COLOUR: lambda _: THINKING + cases.COLOUR,
    cases.HOW_WARM: _ask_for_weather,
    cases.RESULT: _tell_weather,
    cases.WHICH_CITY: lambda _: json.dumps(cases.CITY),
    "joke about cats": lambda _: json.dumps(JOKE),
    cases.WRITE_A_FILE: _run_a_command,
    "written by a tool\n": lambda _: cases.WRITTEN,
    # Some give what a command wrote as JSON.
    "written by a tool\\n": lambda _: cases.WRITTEN,
}


JSON: tuple[dict[str, str], ...] = (cases.CITY, JOKE, {})
KINDS = {"array": [], "boolean": True, "integer": 3, "null": None, "number": 1.5, "object": {}}


def _calls(prompt: str) -> Iterator[str]:
    """A call of each tool that is offered, with some value for each argument."""
    for line in prompt.splitlines():
        if line.startswith('{"type": "function"'):
            tool = json.loads(line)["function"]
            asked = tool.get("parameters", {}).get("properties", {})
            yield call(tool["name"], **{name: _value(schema) for name, schema in asked.items()})


def _value(schema: dict[str, Any]) -> object:
    return schema.get("enum", [KINDS.get(str(schema.get("type")), "你好, こんにちは, Paris")])[0]


def _ways(prompt: str) -> Iterator[str]:
    """What it would say, the likeliest first."""
    last = max(ANSWERS, key=prompt.rfind)
    if last in prompt:
        yield ANSWERS[last](prompt)
        if last == cases.WHICH_CITY:
            yield from (call(name, **cases.CITY) for name in _offered(prompt))
    elif "\ntool\n" not in prompt:
        yield from _calls(prompt)
    yield cases.COLOUR
    yield from _calls(prompt)
    yield from map(json.dumps, JSON)


def _fits(text: str, constraint: JobConstraint) -> bool:
    matcher = constraint.new_matcher()
    try:
        for id_ in text.encode():
            matcher.accept(id_)
    except ConstraintFailed:
        return False
    return matcher.is_accepting


def said(job: Job) -> Script:
    """Whichever of the questions and results that it knows stands last in the prompt decides."""
    ways = _ways(prompt_of(job))
    fitting = (way for way in ways if job.constraint is None or _fits(way, job.constraint))
    return say(next(fitting, cases.COLOUR))


def model(*, constrains: bool = True) -> ScriptedEngine:
    """It says what fits a constraint, or is an engine that cannot be held to anything."""
    card = ModelCard(
        name=cases.MODEL,
        max_model_len=200_000,
        templates={"default": STRICT},
        constrains=constrains,
        has_samplers=True,
    )
    return ScriptedEngine(said, card=card)
