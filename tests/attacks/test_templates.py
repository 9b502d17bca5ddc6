"""Chat templates are programs that came with a model. Rows 1 to 9; more of it is in `tests/prompt`."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.errors import TemplateBudgetExceeded, TemplateError
from dragoman.http.app_state import AppState
from dragoman.prompt import ChatTemplate, PromptBuilder
from dragoman.settings import Settings
from tests.attacks.bodies import SOCKET, changed, good
from tests.attacks.fields import TYPES
from tests.attacks.frame import ROOT, AttackedServer, Frame, attacked, healthy
from tests.prompt.test_render_budget import GIANTS, LOOPS
from tests.prompt.test_sandbox import ESCAPES
from tests.support.parrot import TEMPLATE, parrot
from tests.support.tiny_gguf import write_tiny
from tests.support.tokenizers import byte_level, saved

ENDLESS = LOOPS[1]


def compiles(source: str) -> bool:
    try:
        ChatTemplate(source)
    except TemplateError:
        return False
    return True


BRANCHES = {f"escape {at}": source for at, source in enumerate(ESCAPES) if compiles(source)}
"""Those that do their harm only once they run."""
RUNAWAYS = {"loop": ENDLESS, "giant": GIANTS[0], "growing": GIANTS[2]}
MESSAGES = {
    "/v1/chat/completions": "messages[0].content",
    "/v1/chat/completions/render": "messages[0].content",
    "/v1/chat/completions/input_tokens": "messages[0].content",
    "/v1/tokenize": "messages[0].content",
    "/v1/responses": "input",
    SOCKET: "input",
    "/v1/responses/input_tokens": "input",
}
"""Where the last message is, on the routes that render a template."""


@pytest.fixture(scope="module")
def tricked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """Its template does what the last message says, and is a good one otherwise."""
    cases = "".join(
        f"{{% elif said == '{name}' %}}{source}" for name, source in (BRANCHES | RUNAWAYS).items()
    )
    file = tmp_path_factory.mktemp("model") / "template.jinja"
    text = "{%- set said = messages[-1].content %}{%- if said == '' %}"
    file.write_text(f"{text}{cases}{{%- else %}}{TEMPLATE}{{%- endif %}}")
    with attacked(chat_template=str(file)) as server:
        yield server


def test_every_route_that_renders_is_attacked(tricked: AttackedServer) -> None:
    for route, param in MESSAGES.items():
        assert tricked.send(route, changed(route, param, "hello")).status == 200


@pytest.mark.parametrize("name", BRANCHES)
def test_an_escape_is_an_error_on_every_route(tricked: AttackedServer, name: str) -> None:
    frame = Frame(tricked)
    for route, param in MESSAGES.items():
        error = frame.refused(route, changed(route, param, name), status=(400,))
        assert error["code"] == "template_error"
        assert "class" not in error["message"]
    frame.over()


@pytest.mark.parametrize("name", ["giant", "growing"])
def test_a_runaway_is_stopped_on_every_route(tricked: AttackedServer, name: str) -> None:
    frame, before = Frame(tricked), tricked.memory()
    for route, param in MESSAGES.items():
        error = frame.refused(route, changed(route, param, name), status=(400,))
        assert "stopped" in error["message"]
    frame.over()
    assert tricked.memory() - before < 64 * 2**20


def test_beside_a_runaway_the_others_go_on(tricked: AttackedServer) -> None:
    loop = changed("/v1/chat/completions", "messages[0].content", "loop")
    with healthy(tricked):
        Frame(tricked).refused("/v1/chat/completions", loop, status=(400,))
        for _ in range(100):
            Frame(tricked).over()


def test_once_a_template_ran_away_none_is_rendered_in_the_event_loop() -> None:
    def runs_away() -> None:
        raise TemplateBudgetExceeded("Rendering was stopped.")

    async def threads() -> tuple[int, int]:
        host = AppState(parrot(), Settings(store="none"))
        before = await host.workers.run("", 0, threading.get_ident)
        with pytest.raises(TemplateBudgetExceeded):
            await host.workers.run("", 0, runs_away)
        return before, await host.workers.run("", 0, threading.get_ident)

    before, after = asyncio.run(threads())
    assert before == threading.get_ident() != after


# Loading


@pytest.mark.parametrize("source", [one for one in ESCAPES if not compiles(one)] + [ENDLESS])
def test_a_template_in_a_tokenizer_configuration_is_refused(tmp_path: Path, source: str) -> None:
    saved(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    tokenizer = HfTokenizer(tmp_path)
    with pytest.raises(TemplateError):
        PromptBuilder(card_of(tokenizer, name="model", max_model_len=128), tokenizer)


@pytest.mark.parametrize("source", [one for one in ESCAPES if not compiles(one)])
def test_a_template_in_a_gguf_file_is_refused(tmp_path: Path, source: str) -> None:
    options = LocalOptions(slots=1, context=64, threads=1)
    engine = LocalEngine.open(write_tiny(tmp_path / "model.gguf", source), options)
    with pytest.raises(TemplateError):
        PromptBuilder(engine.card, engine.tokenizer)


@pytest.mark.parametrize("source", [ESCAPES[4], GIANTS[0]], ids=["escape", "giant"])
def test_a_server_does_not_start_with_it(tmp_path: Path, source: str) -> None:
    file = write_tiny(tmp_path / "model.gguf", source)
    command = [sys.executable, "-m", "dragoman", "serve", str(file), "--port", "0", "--store", "memory"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "template" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_jinja2_with_known_holes_is_not_installed() -> None:
    needed = {each.name: each for each in map(Requirement, requires("dragoman") or ())}["jinja2"]
    assert not needed.specifier.contains("3.1.5") and needed.specifier.contains("3.1.6")


# Requests

CODE = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"
NESTED: dict[str, Any] = {
    "chat_template": CODE,
    "chat_template_kwargs": {"chat_template": CODE},
    "template_vars": {"chat_template": CODE},
    "extra_body": {"chat_template": CODE},
    "template": CODE,
    "prompt_template": CODE,
    "custom_prompt": {"template": CODE},
}


@pytest.mark.parametrize("route", sorted({route for routes in TYPES.values() for route in routes}))
def test_no_field_takes_a_template(frame: Frame, route: str) -> None:
    """It is refused, or it changes nothing at all."""
    usual = frame.sent(route, good(route)).status
    for name, value in NESTED.items():
        reply = frame.sent(route, {**good(route), name: value})
        assert reply.status in (400, 404, 409, usual) and b"uid=" not in reply.body, (name, reply.body)


@pytest.mark.parametrize("source", [CODE, ESCAPES[0], ENDLESS, GIANTS[0]])
def test_a_template_that_is_looked_at_reaches_nothing(frame: Frame, source: str) -> None:
    """One route takes a template, to show what it writes; it runs in a process that has nothing and ends."""
    before = frame.server.memory()
    with healthy(frame.server):
        reply = frame.sent("/parse", {"text": "hi", "template": source})
    result = json.loads(reply.body)
    assert reply.status == 200 and result["template_error"] and result["prompt"] is None
    assert b"uid=" not in reply.body
    assert frame.server.memory() - before < 16 * 2**20


def test_a_template_that_is_looked_at_can_open_nothing() -> None:
    """Even if it could name what Python has."""
    attempt = (
        "import socket, os\n"
        "from dragoman.prompt import answer_inspection; answer_inspection._bound()\n"
        "for act in (lambda: open('/etc/passwd'), socket.socket, lambda: os.memfd_create('a')):\n"
        "    try: act()\n"
        "    except OSError: continue\n"
        "    raise SystemExit('opened')\n"
    )
    subprocess.run([sys.executable, "-c", attempt], check=True, timeout=60)


@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs", "template_vars", "extra_body"])
def test_a_template_that_would_count_is_refused(frame: Frame, name: str) -> None:
    route = "/v1/chat/completions"
    assert frame.refused(route, {**good(route), name: NESTED[name]}, status=(400,))["param"]


def test_a_template_in_a_text_is_text(frame: Frame) -> None:
    body = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 100}
    reply = frame.sent("/v1/chat/completions", body)
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == CODE


ODD_KWARGS: dict[str, Any] = {
    "huge": {"a": "x" * 70_000},
    "many": {f"a{number}": number for number in range(10_000)},
    "deep": {"a": [[[[[[[[[[1]]]]]]]]]]},
    "no names": {"": 1},
    "a list": [1],
    "a text": "tokenize",
}


@pytest.mark.parametrize("name", ODD_KWARGS)
def test_odd_variables_are_refused(frame: Frame, name: str) -> None:
    for route in MESSAGES:
        frame.refused(route, {**good(route), "chat_template_kwargs": ODD_KWARGS[name]}, status=(400,))
