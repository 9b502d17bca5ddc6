"""Pictures over HTTP: they are counted, gone on from, told in tokens, and refused by models that see none."""

import base64
import threading
from typing import Any

import pytest

from dragoman.engines.scripted import PLACE_ID, ScriptedEngine, say
from dragoman.media import Media
from tests.http.conftest import Serve
from tests.media.samples import picture
from tests.support.http import post

PNG = base64.b64encode(picture("png", 64, 32)).decode()
URL = f"data:image/png;base64,{PNG}"
PART = {"type": "image_url", "image_url": {"url": URL}}
ASKS: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "What is "}, PART]}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
CHAT = "/v1/chat/completions"


class Watchful(ScriptedEngine):
    """Knows from which threads it was asked."""

    def media_token_ids(self, media: Media) -> list[int]:
        self.threads = {*getattr(self, "threads", ()), threading.current_thread().name}
        return super().media_token_ids(media)


@pytest.fixture
def engine() -> Watchful:
    return Watchful(say("A wall."), modalities=("image",))


def test_a_second_question_goes_on_from_the_first(engine: Watchful, serve: Serve) -> None:
    url = serve(engine)
    first = post(url, CHAT, {"messages": [ASKS]}).json()
    result = first["choices"][0]["message"]
    post(url, CHAT, {"messages": [ASKS, result, {"role": "user", "content": "And?"}]}).json()
    one, other = engine.jobs
    assert first["usage"]["prompt_tokens"] == len(one.prompt)
    assert one.prompt.count(PLACE_ID) == one.media[0].count == 2
    assert other.prompt[: len(one.prompt)] == one.prompt
    assert other.media == one.media
    assert len(engine.placed) == 1


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/tokenize", {"messages": [ASKS]}, lambda match: match["count"]),
        ("/v1/chat/completions/render", {"messages": [ASKS]}, lambda match: len(match["prompt_token_ids"])),
        (
            "/v1/messages/count_tokens",
            {
                "model": "m",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "What is "}, BLOCK]}],
            },
            lambda match: match["input_tokens"],
        ),
        (
            "/v1/responses/input_tokens",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "What is "},
                            {"type": "input_image", "image_url": URL},
                        ],
                    }
                ]
            },
            lambda match: match["input_tokens"],
        ),
    ],
)
def test_what_is_counted_is_what_is_computed(
    engine: Watchful, serve: Serve, path: str, body: dict[str, Any], count: Any
) -> None:
    url = serve(engine, any_model=True)
    used = post(url, CHAT, {"messages": [ASKS]}).json()["usage"]["prompt_tokens"]
    assert count(post(url, path, body).json()) == used


def test_an_engine_is_asked_in_threads_of_work(engine: Watchful, serve: Serve) -> None:
    """However small the request is."""
    url = serve(engine)
    post(url, "/tokenize", {"messages": [ASKS]})
    assert all(name.startswith("dragoman-work") for name in engine.threads)


def test_a_model_that_sees_nothing_says_so(greeter: str) -> None:
    refused = post(greeter, CHAT, {"messages": [ASKS]}).json()["error"]
    assert refused["code"] == "unsupported_content"
    assert refused["param"] == "messages[0].content[1]"


def test_a_prompt_with_a_picture_is_too_long_like_any_other(serve: Serve) -> None:
    engine = ScriptedEngine(say("x"), modalities=("image",))
    engine.card.max_model_len = 40
    refused = post(serve(engine), CHAT, {"messages": [ASKS, ASKS]}).json()["error"]
    assert refused["code"] == "context_length_exceeded"
