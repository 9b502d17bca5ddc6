"""Executors of RL-Kernel as they are, in each of their shapes, over a socket and from the command line."""

from typing import Any

import pytest

from dragoman.cli.engine import make_served_engine
from dragoman.engines.contract import as_engine
from dragoman.engines.protocol import Engine
from dragoman.engines.scripted import END_ID
from dragoman.errors import SettingsError
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.fake_asyncllm import TemplateTokenizer
from tests.support.http import HELLO, post, refusal, stream
from tests.support.rl_executors import Adapter, Backend, BrokenExecutor, RolloutExecutor

CHAT = "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def engine_of(thing: Any, **said: Any) -> Engine:
    return as_engine(thing, **{"chat_template": TEMPLATE, **said})


def ask(thing: Any, said: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    with background(engine_of(thing, **(said or {})), Settings(port=0)) as url:
        reply = post(url, CHAT, {**HELLO, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def content(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("finish", ["stop", None])
def test_candidates_with_a_tokenizer_are_exact(finish: str | None) -> None:
    executor = RolloutExecutor({"model": "policy"}, finish=finish)
    body = ask(executor, {"tokenizer": TemplateTokenizer()}, return_token_ids=True, logprobs=True)
    assert (content(body), body["model"]) == ("Hello", "policy")
    assert body["choices"][0]["token_ids"] == [*b"Hello", END_ID]
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    [(prompts, params)] = executor.calls
    assert set(prompts[0]) == {"prompt_token_ids"}
    assert params["logprobs"] == 0


def test_candidates_without_a_tokenizer_are_text() -> None:
    executor = RolloutExecutor()
    body = ask(executor, model="rollout")
    assert content(body) == "Hello"
    assert executor.calls[0][0] == ["<|user|>hi<|assistant|>"]
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens"] == len("<|user|>hi<|assistant|>")


def test_what_is_asked_alike_goes_in_one_call() -> None:
    executor = RolloutExecutor()
    engine = engine_of(executor)
    result = engine._executor.generate(["a", "b", "c"], [{"top_k": 1}, {"top_k": 2}, {"top_k": 1}])  # type: ignore[attr-defined]
    assert [len(prompts) for prompts, _ in executor.calls] == [2, 1]
    assert [bytes(each.prompt_token_ids) for each in result] == [b"a", b"b", b"c"]


def test_a_completion_backend_is_served() -> None:
    backend = Backend("<think>Hm</think>Hello, world")
    body = ask(backend, temperature=0.5, top_k=3, stop=[","], model="backend")
    assert content(body) == "<think>Hm</think>Hello"
    assert backend.calls == [
        {"prompts": ["<|user|>hi<|assistant|>"], "temperature": 0.5, "stop": None, "extra": {"top_k": 3}}
    ]
    assert body["usage"]["prompt_tokens"] == 7


def test_a_stream_of_a_whole_text() -> None:
    with background(engine_of(Backend()), Settings(port=0)) as url:
        deltas = [chunk["choices"][0]["delta"] for chunk in stream(url, CHAT, HELLO)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello"


def test_what_a_backend_has_no_name_for_is_refused() -> None:
    with background(engine_of(Backend()), Settings(port=0)) as url:
        assert refusal(post(url, CHAT, {**HELLO, "seed": 5})) == (400, "seed")
        assert refusal(post(url, CHAT, {**HELLO, "return_token_ids": True})) == (400, "return_token_ids")


def test_a_method_that_gives_texts_alone() -> None:
    assert content(ask(Adapter(), temperature=0.25, max_tokens=9)) == "0.25 9"
    with background(engine_of(Adapter()), Settings(port=0)) as url:
        assert refusal(post(url, CHAT, {**HELLO, "top_p": 0.5})) == (400, "top_p")


def test_more_answers_than_were_asked_for_are_an_error() -> None:
    with background(engine_of(BrokenExecutor()), Settings(port=0)) as url:
        assert post(url, CHAT, HELLO).status_code == 500


def served(executor: str, **more: Any) -> Engine:
    args = {"executor": f"tests.support.rl_executors:{executor}", **more}
    return make_served_engine(Settings(engine="rollout", engine_args=args, model_name="named"))


def test_the_command_line_makes_one() -> None:
    engine = served("RolloutExecutor", args={"model_config": {"model": "policy"}}, batch=8)
    with background(engine, Settings(port=0)) as url:
        body = post(url, "/v1/completions", {"prompt": "hi"}).json()
    assert (body["model"], body["choices"][0]["text"]) == ("named", "Hello")


@pytest.mark.parametrize("name", ["Backend", "Adapter", "RolloutExecutor"])
def test_each_can_be_named_as_an_engine(name: str) -> None:
    served_engine = make_served_engine(
        Settings(engine=f"tests.support.rl_executors:{name}", model_name="named")
    )
    assert served_engine.card.name == "named"


def test_what_is_no_executor_says_what_is_missing() -> None:
    with pytest.raises(SettingsError, match="neither generate_candidates nor a generate that takes prompts"):
        served("Candidate", args={"prompt_token_ids": [], "token_ids": [], "text": "", "finish_reason": ""})
    with pytest.raises(SettingsError, match="`engine_args` is wrong for rollout"):
        served("Backend", exeuctor="x")
