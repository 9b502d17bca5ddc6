"""Pictures in the results of tools that the server runs: a model that sees is shown them, in every API."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.engines.scripted import PLACE_ID, Script, ScriptedEngine, say
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.media import Media
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.http.test_messages import events, fold
from tests.mcp.support import sdk_server
from tests.media.samples import picture, sound
from tests.support.http import post
from tests.support.tool_model import call, prompt_of

RED, TONE = picture("png", width=64, height=64), sound("wav", 0.02)
RED64, TONE64 = b64encode(RED).decode(), b64encode(TONE).decode()
SHOW = call("show", data=RED64)
BOTH = call("show", data=RED64, sound=TONE64)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SERVER = {"type": "mcp", "server_label": "eyes", "require_approval": "never"}
TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "eyes"}
SAID = [{"role": "user", "content": "What is there?"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "tools": [SERVER]},
    RESPONSES: {"input": SAID, "tools": [SERVER]},
    MESSAGES: {"model": "scripted", "max_tokens": 2000, "messages": SAID, "tools": [TOOLSET]},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("mcp") / "mcp.json"
    with sdk_server("http") as url:
        file.write_text(json.dumps({"mcpServers": {"eyes": {"url": url}}}))
        yield str(file)


class DamagedPictures(ScriptedEngine):
    """To which all pictures are damaged behind their headers."""

    def media_token_ids(self, media: Media) -> list[int]:
        raise BadRequest("damaged")


def started(
    serve: Serve, config: str, *said: str, kind: type[ScriptedEngine] = ScriptedEngine, **more: Any
) -> tuple[str, ScriptedEngine]:
    """A server whose model says these things, one a turn; and the model."""

    left = iter(said)

    def answer(_: Job) -> Script:
        return say(next(left))

    engine = kind(answer, modalities=more.pop("modalities", ("image",)))
    settings = {"mcp_config": config, "dialect": "hermes", "store": "memory", **more}
    return serve(engine, **settings), engine


def told(engine: ScriptedEngine) -> tuple[list[str], str]:
    """What the last turn was shown, and what it read behind the call."""
    job = engine.jobs[-1]
    return [span.media.kind for span in job.media], prompt_of(job).rpartition("tool\n")[2]


@pytest.mark.parametrize("path", ASKED)
def test_a_model_that_sees_is_shown_a_picture(serve: Serve, config: str, path: str) -> None:
    url, engine = started(serve, config, SHOW, "It is red.")
    reply = post(url, path, ASKED[path])
    assert reply.status_code == 200 and "It is red." in reply.text
    (span,) = engine.jobs[-1].media
    assert (span.media.data, engine.jobs[-1].prompt[span.start]) == (RED, PLACE_ID)
    assert "before" in told(engine)[1] and "behind" in told(engine)[1] and "[image" not in told(engine)[1]


@pytest.mark.parametrize(
    ("path", "more", "shown"),
    [
        *((path, {"modalities": ()}, []) for path in ASKED),
        (CHAT, {"kind": DamagedPictures}, []),
        (CHAT, {"limits": Limits(media_pixels=100)}, []),
        (CHAT, {"limits": Limits(media_total_bytes=len(RED) - 1)}, []),
        (CHAT, {"modalities": ("image", "audio"), "limits": Limits(media_files=1)}, ["image"]),
    ],
)
def test_of_others_it_is_told(
    serve: Serve, config: str, path: str, more: dict[str, Any], shown: list[str]
) -> None:
    url, engine = started(serve, config, BOTH, "Well.", **more)
    reply = post(url, path, ASKED[path])
    assert reply.status_code == 200, reply.text
    kinds, text = told(engine)
    assert (kinds, "[image image/png, 1 KiB]" in text, "[audio audio/wav" in text) == (
        shown,
        not shown,
        True,
    )


@pytest.mark.parametrize("path", ASKED)
def test_sounds_are_played(serve: Serve, config: str, path: str) -> None:
    url, engine = started(serve, config, BOTH, "Well.", modalities=("image", "audio"))
    assert post(url, path, ASKED[path]).status_code == 200
    assert told(engine)[0] == ["image", "audio"]


def test_an_item_has_what_was_shown(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, SHOW, "It is red.")
    result = post(url, RESPONSES, ASKED[RESPONSES]).json()["output"][1]
    assert result["output"].splitlines() == ["before", "[image image/png, 1 KiB]", "behind"]
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{RED64}", "detail": "auto"}
    assert result["content"] == [
        {"type": "input_text", "text": "before"},
        image,
        {"type": "input_text", "text": "behind"},
    ]


@pytest.mark.parametrize("stored", [True, False])
def test_the_next_response_sees_it_still(serve: Serve, config: str, stored: bool) -> None:
    url, engine = started(serve, config, SHOW, "It is red.", "Still red.")
    first = post(url, RESPONSES, {**ASKED[RESPONSES], "store": stored}).json()
    fields = {"previous_response_id": first["id"], "input": "Sure?"}
    sent = {"input": [*SAID, *first["output"], {"role": "user", "content": "Sure?"}]}
    reply = post(url, RESPONSES, {**(fields if stored else sent), "tools": [SERVER]})
    assert reply.status_code == 200, reply.text
    assert [span.media.data for span in engine.jobs[-1].media] == [RED]


def test_another_model_that_does_not_see_is_told_of_it(serve: Serve, config: str) -> None:
    url, _ = started(serve, config, SHOW, "It is red.")
    output = post(url, RESPONSES, ASKED[RESPONSES]).json()["output"]
    other, engine = started(serve, config, "What?", modalities=())
    reply = post(other, RESPONSES, {"input": [*SAID, *output, *SAID], "store": False})
    assert reply.status_code == 200, reply.text
    assert "[image image/png, 1 KiB]" in prompt_of(engine.jobs[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_blocks_of_it_that_may_come_back(serve: Serve, config: str, stream: bool) -> None:
    url, engine = started(serve, config, SHOW, "It is red.", "Still red.")
    reply = post(url, MESSAGES, {**ASKED[MESSAGES], "stream": stream})
    content = (fold(events(reply)) if stream else reply.json())["content"]
    assert [part["type"] for part in content[1]["content"]] == ["text", "image", "text"]
    more = [*SAID, {"role": "assistant", "content": content}, {"role": "user", "content": "Sure?"}]
    again = post(url, MESSAGES, {**ASKED[MESSAGES], "messages": more})
    assert again.status_code == 200, again.text
    assert [span.media.data for span in engine.jobs[-1].media] == [RED]
