"""Loops of calls over HTTP: ids go on from turn to turn, whether or not the client sends reasoning back."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import Script, ScriptedEngine
from dragoman.types import Message, ToolCall
from tests.http.conftest import Serve
from tests.prompt.support import SHARED, TEMPLATES
from tests.support.http import post
from tests.support.seams import TOOL, WRITES, Client, Model, answers

MODELS = (
    "*Qwen3-0.6B*",
    "*gpt-oss*",
    "*MiniMax-M2*",
    "*Kimi-K3*",
    "*gemma-4*",
    "*DeepSeek-V3.2*",
    "*GLM-4.6*",
)
PATHS = [
    *sorted((TEMPLATES / "history").glob("*.jinja")),
    *sorted(path for name in MODELS for path in (SHARED / "templates").glob(name)),
]


class Talk:
    """One client, and a model that answers what it is to answer."""

    def __init__(self, serve: Serve, path: Path, client: Client, **settings: Any) -> None:
        source = path.read_text()
        # Some templates write the date, and a server has no other.
        self.model, self._client = Model(source, clock=datetime.now), client
        self._ids: tuple[int, ...] = ()
        card = ModelCard(name="m", max_model_len=1 << 16, templates={"default": source})
        words: Any = self.model.vocabulary
        engine = ScriptedEngine(lambda job: Script(self._ids, burst=64), tokenizer=words, card=card)
        self._url = serve(engine, **settings)
        self._sent: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Paris?"}]
        self._meant = [Message(role="user", content="Weather in Paris?")]

    def turn(self, answer: Message) -> tuple[list[int], list[int], str]:
        """The ids of the prompt and of the answer, and what the prompt is had the client sent all of it."""
        text = self.model.text(self._meant)
        self._ids = self.model.vocabulary.sample(self.model.writes(WRITES[0], self._meant, answer))
        asked = {"messages": self._sent, "tools": [TOOL], "return_token_ids": True}
        body = post(self._url, "/v1/chat/completions", asked).json()
        mapping = {name: value for name, value in body["choices"][0]["message"].items() if value}
        calls = mapping.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "12 °C"} for one in calls]
        following = results or [{"role": "user", "content": "And then?"}]
        meant = Message(
            role="assistant",
            content=mapping.get("content"),
            reasoning=mapping.get("reasoning_content") or mapping.get("reasoning"),
            tool_calls=tuple(ToolCall(id=one["id"], **one["function"]) for one in calls),
        )
        if self._client == "drops it":
            mapping = {name: value for name, value in mapping.items() if not name.startswith("reasoning")}
        self._sent += [mapping, *following]
        self._meant += [meant, *(Message(**{"name": None, **one}) for one in following)]
        return body["prompt_token_ids"], list(self._ids), text


@pytest.mark.parametrize("client", ["sends it back", "drops it"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_loop_of_calls_goes_on_wherever_the_template_keeps_its_text(
    serve: Serve, path: Path, client: Client
) -> None:
    """Thoughts are given back, so that a client that drops them is one that sends them."""
    talk = Talk(serve, path, client)
    before, known = list[int](), ""
    for answer in answers(client)[:3]:
        prompt, ids, text = talk.turn(answer)
        # An answer that says the same is kept as it was sampled: some templates write a newline more.
        value = talk.model.decode(prompt)
        assert value == text or "gemma-4" in path.stem
        assert "".join(value.split()) == "".join(text.split())
        assert prompt[: len(before)] == before or not text.startswith(known)
        end = int(ids[-1] in talk.model.vocabulary.end_ids)
        before = [*prompt, *ids[: len(ids) - end]]
        known = talk.model.decode(before)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_turn_goes_on_from_what_was_sampled(serve: Serve, path: Path) -> None:
    talk = Talk(serve, path, "drops it", history="sampled")
    before = list[int]()
    for answer in answers("drops it"):
        prompt, ids, _ = talk.turn(answer)
        assert prompt[: len(before)] == before
        before = [*prompt, *ids]
