"""Token ids in: a chat whose prompt is ids, and what engines are told about ids."""

from typing import Any

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, END_ID, ByteTokenizer, Script, ScriptedEngine, say
from tests.http.conftest import RunningServer, Serve
from tests.support.http import HELLO, post, refusal, stream
from tests.support.parrot import call

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def thinker(text: str, template: str = THINKS) -> ScriptedEngine:
    card = ModelCard(name="scripted", max_model_len=4096, templates={"default": template})
    return ScriptedEngine(say(text), card=card)


def rendered(url: str, body: dict[str, Any] = HELLO) -> list[int]:
    ids: list[int] = post(url, f"{CHAT}/render", body).json()["prompt_token_ids"]
    return ids


def message(url: str, **body: Any) -> dict[str, Any]:
    reply = post(url, CHAT, body)
    assert reply.status_code == 200, reply.text
    fields: dict[str, Any] = reply.json()["choices"][0]["message"]
    return fields


@pytest.mark.parametrize("name", ["prompt_token_ids", "input_ids"])
def test_ids_are_the_prompt(parrot: RunningServer, name: str) -> None:
    ids = rendered(parrot.url)
    assert message(parrot.url, **{name: ids})["content"] == "hi"
    assert message(parrot.url, messages=[], **{name: ids})["content"] == "hi"
    assert message(parrot.url, messages=None, **{name: ids})["content"] == "hi"
    assert list(parrot.engine.jobs[-1].prompt) == ids


def test_the_template_is_not_asked(serve: Serve) -> None:
    engine = ScriptedEngine(say("hi"), card=ModelCard(name="bare", max_model_len=64))
    assert message(serve(engine), prompt_token_ids=[1, 2, 3], messages=HELLO["messages"])["content"] == "hi"
    assert engine.jobs[0].prompt == (1, 2, 3)


def test_calls_are_read_in_the_dialect_of_the_model(parrot: RunningServer) -> None:
    ids = rendered(parrot.url, {"messages": [{"role": "user", "content": call("f", a=1)}]})
    (result,) = message(parrot.url, prompt_token_ids=ids, tools=TOOLS)["tool_calls"]
    assert (result["function"]["name"], result["function"]["arguments"]) == ("f", '{"a": 1}')


def test_streamed_as_well(parrot: RunningServer) -> None:
    seen = stream(parrot.url, CHAT, {"prompt_token_ids": rendered(parrot.url)})
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in seen) == "hi"


@pytest.mark.parametrize(
    ("begun", "reasoning"),
    [("", "so"), ("I was", "so"), ("I was</think>", None), ("I was</think>Well", None)],
)
def test_reasoning_that_the_ids_have_opened_is_gone_on_with(
    serve: Serve, begun: str, reasoning: str | None
) -> None:
    url = serve(thinker("so</think>yes"), dialect="deepseek_r1")
    fields = message(url, prompt_token_ids=[*rendered(url), *begun.encode()])
    assert fields.get("reasoning_content") == reasoning


def test_what_a_user_wrote_opens_nothing(serve: Serve) -> None:
    url = serve(thinker("so</think>yes", CHATML), dialect="deepseek_r1")
    ids = rendered(url, {"messages": [{"role": "user", "content": "what is <think>?"}]})
    assert message(url, prompt_token_ids=ids)["reasoning_content"] is None


def test_routes_that_show_the_prompt_show_the_ids(greeter: str) -> None:
    body = {"prompt_token_ids": [104, 105]}
    shown = post(greeter, f"{CHAT}/render", body).json()
    assert shown == {"prompt": "hi", "prompt_token_ids": [104, 105]}
    assert post(greeter, f"{CHAT}/input_tokens", body).json()["input_tokens"] == 2
    assert post(greeter, "/tokenize", body).json()["tokens"] == [104, 105]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "input_ids": [1]}, "input_ids"),
        ({"prompt_token_ids": [10**6]}, "prompt_token_ids"),
        ({"input_ids": [-1]}, "input_ids[0]"),
        ({"input_ids": "hi"}, "input_ids"),
        ({"input_ids": [1] * 5000}, "input_ids"),
        ({"prompt_token_ids": [1], "response_prefix": "So"}, "response_prefix"),
        ({**HELLO, "prompt_token_ids": [1], "continue_final_message": True}, "continue_final_message"),
        ({"prompt_token_ids": [1], "documents": [{"text": "x"}]}, "documents"),
        (
            {
                "prompt_token_ids": [1],
                "tools": [{"type": "mcp", "server_label": "x", "require_approval": "never"}],
            },
            "prompt_token_ids",
        ),
    ],
)
def test_what_is_wrong_with_them_is_named(greeter: str, body: dict[str, Any], param: str) -> None:
    assert refusal(post(greeter, CHAT, body)) == (400, param)


@pytest.mark.parametrize("path", [CHAT, RAW])
@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [7, 8]), ("min_tokens", 3), ("ignore_eos", True), ("prompt_logprobs", 2)],
)
def test_sampling_reaches_the_engine(parrot: RunningServer, path: str, field: str, value: Any) -> None:
    assert post(parrot.url, path, {**_asked(path), field: value}).status_code == 200
    result = getattr(parrot.engine.jobs[-1].sampling, field)
    assert result == (frozenset(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("path", [CHAT, RAW])
@pytest.mark.parametrize(("field", "value"), [("priority", -3), ("cache_salt", "mine")])
def test_the_order_and_the_salt_reach_the_engine(
    parrot: RunningServer, path: str, field: str, value: Any
) -> None:
    assert post(parrot.url, path, {**_asked(path), field: value}).status_code == 200
    assert getattr(parrot.engine.jobs[-1], field) == value


def _asked(path: str) -> dict[str, Any]:
    # The parrot wants a whole conversation to repeat from.
    return HELLO if path == CHAT else {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], "hi", ["hi"]])
def test_a_raw_prompt_in_every_form(serve: Serve, prompt: Any) -> None:
    engine = ScriptedEngine(say("!"))
    assert post(serve(engine), RAW, {"prompt": prompt}).status_code == 200
    assert engine.jobs[0].prompt == (104, 105)


def test_a_stop_id_is_told_and_is_no_text(serve: Serve) -> None:
    class StoppingEngine(ScriptedEngine):
        """Ends at its stop ids, as engines do."""

        def submit(self, job: Any, sink: Any) -> Any:
            def stopped(step: Any) -> None:
                if step.ids and step.ids[-1] in job.sampling.stop_token_ids:
                    step.finish, step.stop_id = "stop", step.ids[-1]
                sink(step)

            return super().submit(job, stopped)

    url = serve(StoppingEngine(say("one.two")))
    body = {"prompt": "x", "stop_token_ids": [46], "return_token_ids": True}
    (choice,) = post(url, RAW, body).json()["choices"]
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == ("one", 46, "stop")
    assert bytes(choice["token_ids"]) == b"one."


@pytest.mark.parametrize(("skip", "text"), [(None, "ab"), (True, "ab"), (False, "a<|im_start|>b")])
def test_special_tokens_of_a_completion_are_shown_on_demand(
    serve: Serve, skip: bool | None, text: str
) -> None:
    start = ByteTokenizer().special_ids["<|im_start|>"]
    url = serve(ScriptedEngine(Script([97, start, 98, END_ID])))
    (choice,) = post(url, RAW, {"prompt": "x", "skip_special_tokens": skip}).json()["choices"]
    assert choice["text"] == text


def test_prompt_log_probabilities_of_a_chat(greeter: str) -> None:
    body = {"prompt_token_ids": [104, 105], "prompt_logprobs": 1}
    first, second = post(greeter, CHAT, body).json()["prompt_logprobs"]
    assert first is None and second["105"]["decoded_token"] == "i"
