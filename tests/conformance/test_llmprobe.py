"""The probe that engines are compared with, at its full depth, and with a script for a model."""

import json
import subprocess
from pathlib import Path

from dragoman.engines.scripted import Script, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.support.outside import bare_environment, node_program
from tests.support.tool_model import NAME, call, prompt_of, tool_model

KINDS = {"array": [], "boolean": True, "integer": 3, "null": None, "number": 1.5, "object": {}}
NEEDS_A_MODEL = ("json-mode", "structured", "prompt-cach", "args-literal")
"""A script does not keep to schemas, and does not count what it has read before."""


def said(job: Job) -> Script:
    """Calls the first tool there is; once that has answered, or if there is none, says what it remembers."""
    prompt = prompt_of(job)
    offered = [line for line in prompt.splitlines() if line.startswith('{"type": "function"')]
    if not offered or "\ntool\n" in prompt:
        return say("Ada, I believe." if "Ada" in prompt else "Hello there.")
    tool = json.loads(offered[0])["function"]
    asked = tool["parameters"].get("properties", {})
    values = {name: KINDS.get(schema.get("type"), "Paris") for name, schema in asked.items()}
    return say(call(tool["name"], **values))


def test_llmprobe(tmp_path: Path) -> None:
    program = node_program("llmprobe")
    options = ["--full", "--json", "--no-bench", "--no-save", "-m", NAME]
    report = tmp_path / "report.json"
    # Into a file: of what it writes to a pipe, it waits for no more than 64 KiB to be read.
    with (
        background(tool_model(said, context=65536), Settings(port=0, store="memory")) as url,
        report.open("w") as out,
    ):
        subprocess.run(
            [program, url, *options], env=bare_environment(tmp_path), stdout=out, timeout=300, check=False
        )
    outcome = json.loads(report.read_text())["conformance"]
    failed = {
        result["id"]: result["failures"] for result in outcome["results"] if result["outcome"] == "fail"
    }
    assert not {id_: why for id_, why in failed.items() if not any(name in id_ for name in NEEDS_A_MODEL)}
    passed = {surface["surface"]: surface["passed"] for surface in outcome["bySurface"]}
    assert passed["chat"] > 60
    assert passed["responses"] > 60
    assert passed["messages"] > 40
