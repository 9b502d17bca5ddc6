"""The AI SDK of JavaScript, through the Responses API."""

import json
from pathlib import Path

from dragoman.engines.scripted import Script, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.conformance.conftest import MODEL
from tests.support.outside import run_module
from tests.support.tool_model import NAME, call, prompt_of, tool_model

MODULES = Path(__file__).parent / "node"


def said(job: Job) -> Script:
    outcome = "21 degrees in Paris" in prompt_of(job)
    return say("It has 21 degrees." if outcome else call("weather", city="Paris"))


def test_a_tool_loop_whole_and_streamed() -> None:
    with background(tool_model(said), Settings(port=0, store="memory")) as url:
        result = json.loads(run_module(MODULES / "ai_tools.mjs", f"{url}/v1", NAME))
    wanted = {"text": "It has 21 degrees.", "calls": [["weather", {"city": "Paris"}]], "finish": "stop"}
    assert result == {"whole": wanted, "streamed": wanted}


def test_an_object_of_a_schema(base_url: str) -> None:
    assert json.loads(run_module(MODULES / "ai_object.mjs", base_url, MODEL))["city"] in ("Paris", "Rome")
