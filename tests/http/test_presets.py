"""What an operator says for all requests, and to whom requests go that name a model which is not there."""

from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.errors import SettingsError
from dragoman.http.app import App
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import HELLO, get, post, refusal, stream

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TEMPLATE = CHATML + "{% if enable_thinking is false %}<quick>{% endif %}"
CHATML_HELLO = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
CARD = ModelCard(
    name="scripted",
    max_model_len=4096,
    templates={"default": TEMPLATE},
    adapters=("poet",),
    has_samplers=True,
)


def engine(text: str = "one two three") -> ScriptedEngine:
    return ScriptedEngine(say(text), card=CARD)


def content(url: str, **more: Any) -> str:
    text: str = post(url, CHAT, {**HELLO, **more}).json()["choices"][0]["message"]["content"]
    return text


def test_the_file_says_how_to_sample_and_a_request_says_it_better(serve: Serve) -> None:
    scripted_engine = engine()
    url = serve(
        scripted_engine, sampling={"temperature": 0.3, "top_k": 9, "seed": 5}, override={"top_p": 0.5}
    )
    post(url, CHAT, {**HELLO, "temperature": 0.9, "top_p": 0.8})
    asked = scripted_engine.jobs[0].sampling
    assert (asked.temperature, asked.top_k, asked.top_p, asked.seed) == (0.9, 9, 0.5, 5)


def test_the_reply_names_what_was_not_for_the_request_to_say(serve: Serve) -> None:
    decided = {"temperature": 0.5, "top_p": 0.5, "max_tokens": 9, "chat_template_kwargs": {"tone": "dry"}}
    url = serve(engine(), override=decided, store="memory")
    fields = {"temperature": 0.5, "top_p": 0.9, "chat_template_kwargs": {"tone": "warm"}}
    wanted = "top_p, max_tokens, chat_template_kwargs.tone"
    for path, body in (
        (CHAT, {**HELLO, "max_tokens": 5}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 5}),
    ):
        for streams in (False, True):
            reply = post(url, path, {**fields, **body, "stream": streams})
            assert reply.headers["x-dragoman-overridden"] == wanted
        assert "x-dragoman-overridden" not in post(url, CHAT, HELLO).headers


@pytest.mark.parametrize("field", ["sampling", "override"])
def test_a_stop_string_of_the_operator_ends_every_answer(serve: Serve, field: str) -> None:
    url = serve(engine(), **{field: {"stop": [" three"]}})
    assert content(url) == "one two"
    assert content(url, stop=["ne"]) == "o"
    chunks = stream(url, CHAT, HELLO)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "one two"


def test_stop_strings_of_an_override_hold_beside_those_of_a_request(serve: Serve) -> None:
    assert content(serve(engine(), override={"stop": " three"}), stop=["nothing"]) == "one two"


def test_variables_of_the_template_are_seen_by_all_routes(serve: Serve) -> None:
    url = serve(engine(), sampling={"chat_template_kwargs": {"enable_thinking": False}}, store="memory")
    rendered = post(url, CHAT + "/render", HELLO).json()
    assert rendered["prompt"].endswith("<quick>")
    assert not post(url, CHAT + "/render", {**HELLO, "enable_thinking": True}).json()["prompt"].endswith(">")
    for path, body in ((CHAT, HELLO), (RESPONSES, {"input": "hi"})):
        counted = post(url, path + "/input_tokens", body).json()["input_tokens"]
        assert counted == len(rendered["prompt_token_ids"])
        usage = post(url, path, body).json()["usage"]
        assert counted in (usage.get("prompt_tokens"), usage.get("input_tokens"))
    assert post(url, "/tokenize", HELLO).json()["tokens"] == rendered["prompt_token_ids"]


def test_each_name_of_the_model_has_its_own(serve: Serve) -> None:
    scripted_engine = engine()
    url = serve(
        scripted_engine,
        model_alias=["quick"],
        sampling={"max_tokens": 50},
        presets={
            "scripted": {"sampling": {"top_k": 3}},
            "quick": {"override": {"max_tokens": 3}},
            "poet": {"sampling": {"temperature": 1.5}},
        },
    )
    for model in ("scripted", "quick", "poet"):
        post(url, CHAT, {**HELLO, "model": model})
    asked = [
        (job.sampling.max_tokens, job.sampling.top_k, job.sampling.temperature)
        for job in scripted_engine.jobs
    ]
    assert asked == [(50, 3, 1.0), (3, 3, 1.0), (50, 0, 1.5)]


def test_an_adapter_that_comes_later_may_have_its_own() -> None:
    App(engine(), Settings(presets={"later": {"sampling": {"top_k": 3}}}, lora_dir="."))  # type: ignore[dict-item]


def test_an_override_of_the_length_counts_for_responses_too(serve: Serve) -> None:
    scripted_engine = engine()
    url = serve(scripted_engine, override={"max_tokens": 3}, store="memory")
    reply = post(url, RESPONSES, {"input": "hi", "max_output_tokens": 100}).json()
    assert (reply["status"], scripted_engine.jobs[0].sampling.max_tokens) == ("incomplete", 3)
    assert reply["max_output_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HELLO, "max_tokens": 99}),
        (CHAT, {**HELLO, "max_completion_tokens": 99}),
        (CHAT, {**HELLO, "min_tokens": 99, "ignore_eos": True}),
        (CHAT, {**HELLO, "model": "mine", "n": 2}),
        (CHAT, {**HELLO, "model": "poet", "max_tokens": 99}),
        ("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 99}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 99}),
    ],
)
def test_what_is_decided_holds_by_every_name(serve: Serve, path: str, body: dict[str, Any]) -> None:
    scripted_engine = engine("a long answer" * 9)
    url = serve(scripted_engine, override={"max_tokens": 4}, model_alias=["mine"], store="memory")
    assert post(url, path, body).status_code == 200
    assert {(job.sampling.max_tokens, job.sampling.min_tokens <= 4) for job in scripted_engine.jobs} == {
        (4, True)
    }


def test_a_response_tells_what_held(serve: Serve) -> None:
    url = serve(engine(), sampling={"temperature": 0.3}, override={"top_p": 0.5}, store="memory")
    reply = post(url, RESPONSES, {"input": "hi", "top_p": 0.9}).json()
    assert (reply["temperature"], reply["top_p"], reply["presence_penalty"]) == (0.3, 0.5, 0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"presets": {"nobody": {"sampling": {"top_k": 3}}}}, "no model 'nobody'"),
        ({"sampling": {"stop_token_ids": [10**6]}}, "outside of the vocabulary"),
        ({"override": {"stop": ["x" * 5000]}}, "characters in a stop string"),
    ],
)
def test_what_no_request_could_be_given_ends_the_start(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        App(engine(), Settings(**wrong))


def test_any_name_is_answered_by_the_model_which_says_its_own(serve: Serve) -> None:
    url = serve(engine(), any_model=True, model_alias=["mine"], store="memory")
    for asked, text in (("gpt-4o", "scripted"), ("mine", "mine"), ("poet", "poet")):
        assert post(url, CHAT, {**HELLO, "model": asked}).json()["model"] == text
        assert post(url, RESPONSES, {"input": "hi", "model": asked}).json()["model"] == text
        assert stream(url, CHAT, {**HELLO, "model": asked})[0]["model"] == text
        assert get(url, f"/v1/models/{asked}").json()["id"] == text


def test_without_it_a_name_that_is_not_there_is_a_404(serve: Serve) -> None:
    assert refusal(post(serve(engine()), CHAT, {**HELLO, "model": "gpt-4o"})) == (404, "model")


def test_any_name_may_have_a_preset_where_any_name_is_answered(serve: Serve) -> None:
    url = serve(engine(), any_model=True, presets={"gpt-4o": {"sampling": {"stop": " two"}}})
    assert (content(url, model="gpt-4o"), content(url, model="o3")) == ("one", "one two three")


def test_stop_strings_of_a_template_end_answers_to_conversations(serve: Serve) -> None:
    template = "{% set stop_strings = [' three', '<|im_start|>'] %}" + CHATML
    scripted_engine = ScriptedEngine(
        say("one two three"), card=replace(CARD, templates={"default": template})
    )
    url = serve(scripted_engine)
    assert (content(url), content(url, stop=["ne"])) == ("one two", "o")
    assert post(url, "/v1/completions", {"prompt": "hi"}).json()["choices"][0]["text"] == "one two three"
    asked = [job.sampling.stop_token_ids for job in scripted_engine.jobs]
    # A control token has no text, so its id is what ends the answer.
    assert asked == [{257}, {257}, frozenset()]


def test_a_model_without_a_template_is_talked_to_all_the_same(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(ScriptedEngine(say("hi"), card=replace(CARD, templates={})))
    assert content(url) == "hi"
    assert post(url, CHAT + "/render", HELLO).json()["prompt"] == CHATML_HELLO
    assert "the template chatml, because the model has none" in caplog.text


def test_a_template_by_its_name(serve: Serve) -> None:
    url = serve(engine("Sure.\nUser: And?"), chat_template="plain")
    assert post(url, CHAT + "/render", HELLO).json()["prompt"] == "User: hi\nAssistant:"
    assert content(url) == "Sure."
