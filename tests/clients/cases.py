"""What a program tries with a client of other people, and how it tells of it.

A program is a module of `tests/clients/programs`: functions with `@case(API, WHAT)`, each of which asks one
thing of a server as that client's users do, and asserts what comes back. `python -m tests.clients.programs.X
BASE_URL` runs them all in the environment of that client and prints one line of JSON for each;
`tests/conformance/test_programs.py` calls those whose packages the environment of the tests has.

Only the standard library is imported here: each client has an environment of its own.
"""

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

MODEL = "scripted"
NAME_A_COLOUR, COLOUR = "Name a colour.", "Blue."
THINK_OF_A_COLOUR, THOUGHT = "Think of a colour.", "The sky has one."
HOW_WARM, RESULT, WARM = "How warm is it in Paris?", "21 degrees in Paris", "It has 21 degrees."
WHICH_CITY, CITY = "Which city is it?", {"city": "Paris"}
WRITE_A_FILE, FILE, WRITTEN = "Write out.txt.", "by a tool", "It is written."
"""What the model is asked, and what it says to that: see tests/clients/model.py."""

Run: TypeAlias = Callable[[str], object]


class Case(NamedTuple):
    api: str
    what: str
    run: Run
    """It is given the base URL, with `/v1`."""


class SeenRequest(NamedTuple):
    api: str
    what: str
    failed: str | None
    """In a few words."""


def case(api: str, what: str) -> Callable[[Run], Run]:
    def marked(run: Run) -> Run:
        run.case = Case(api, what, run)  # type: ignore[attr-defined]
        return run

    return marked


def cases_of(program: Mapping[str, Any]) -> list[Case]:
    """Those of a module's names."""
    return [value.case for value in program.values() if isinstance(getattr(value, "case", None), Case)]


def weather(city: str) -> str:
    """How warm it is in a city.

    Args:
        city: The name of the city.
    """
    return f"21 degrees in {city}"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How warm it is in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def try_case(case: Case, url: str) -> SeenRequest:
    try:
        case.run(url)
    except Exception as error:
        traceback.print_exc()
        return SeenRequest(case.api, case.what, " ".join(f"{type(error).__name__}: {error}".split())[:300])
    return SeenRequest(case.api, case.what, None)


def main(program: Mapping[str, Any]) -> None:
    """Runs the cases of a program one after another: no failure keeps the others from being tried."""
    for case in cases_of(program):
        seen = json.dumps(try_case(case, sys.argv[1])._asdict())
        # Some clients print, and do not end their line.
        print(f"\n{seen}", flush=True)
