"""The exact ids of every turn, through chat, tool calls and several turns."""

from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.engines.scripted import END_ID, Script, say
from dragoman.types import Job
from tests.http.conftest import Serve
from tests.support.http import delete, get, post, stream
from tests.support.parrot import TEMPLATE
from tests.support.tool_model import call, tool_model

TOOL = {"name": "f", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "hi"}


class JobRecorder:
    """What the engine was asked, and what it said."""

    def __init__(self, *said: str) -> None:
        self.jobs: list[Job] = []
        self._said = said

    def answer(self, job: Job) -> Script:
        self.jobs.append(job)
        return say(self._said[len(self.jobs) - 1])

    def ids(self, number: int) -> list[int]:
        return [*self._said[number].encode(), END_ID]


@pytest.fixture
def heard() -> JobRecorder:
    return JobRecorder(call("f", a=1), "Done.", "Bye.")


@pytest.fixture
def url(serve: Serve, heard: JobRecorder) -> str:
    return serve(tool_model(heard.answer), dialect="hermes", store="memory", trajectories=True)


def sampled(segment: dict[str, Any]) -> list[int]:
    return [id_ for id_, was_sampled in zip(segment["ids"], segment["mask"], strict=True) if was_sampled]


def test_a_chain_of_responses_is_one_sequence(url: str, heard: JobRecorder) -> None:
    first = post(url, "/v1/responses", {"input": "hi", "tools": [{"type": "function", **TOOL}]}).json()
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "1"}
    more = {"previous_response_id": first["id"], "tools": [{"type": "function", **TOOL}]}
    second = post(url, "/v1/responses", {"input": [result], **more}).json()
    (segment,) = get(url, f"/v1/trajectories/{second['id']}").json()["segments"]
    assert segment["ids"] == [*heard.jobs[1].prompt, *heard.ids(1)]
    assert sampled(segment) == [*heard.ids(0), *heard.ids(1)]
    assert segment["answers"] == [first["id"], second["id"]]


def test_a_chat_history_that_we_produced_is_one_sequence(url: str, heard: JobRecorder) -> None:
    tools = [{"type": "function", "function": TOOL}]
    first = post(url, "/v1/chat/completions", {"messages": [USER], "tools": tools}).json()
    outcome = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": outcome["tool_calls"][0]["id"], "content": "1"}
    chunks = stream(url, "/v1/chat/completions", {"messages": [USER, outcome, result], "tools": tools})
    (segment,) = get(url, f"/v1/trajectories/{chunks[0]['id']}").json()["segments"]
    assert segment["ids"] == [*heard.jobs[1].prompt, *heard.ids(1)]
    assert sampled(segment) == [*heard.ids(0), *heard.ids(1)]


def test_an_answer_that_was_changed_begins_another_sequence(url: str, heard: JobRecorder) -> None:
    first = post(url, "/v1/responses", {"input": "hi"}).json()
    changed = [USER, {"role": "assistant", "content": "Nothing like it."}, USER]
    second = post(url, "/v1/responses", {"input": changed}).json()
    (segment,) = get(url, f"/v1/trajectories/{second['id']}").json()["segments"]
    assert sampled(segment) == heard.ids(1)
    assert first["id"] not in segment["answers"]


def test_log_probabilities_are_aligned(url: str) -> None:
    body = post(url, "/v1/responses", {"input": "hi"}).json()
    (segment,) = get(url, f"/v1/trajectories/{body['id']}").json()["segments"]
    numbers = [int(logprob is not None) for logprob in segment["logprobs"]]
    assert numbers == segment["mask"]


def test_a_conversation_has_a_trajectory(url: str, heard: JobRecorder) -> None:
    talk = post(url, "/v1/conversations", {}).json()["id"]
    for _ in range(2):
        post(url, "/v1/responses", {"input": "hi", "conversation": talk})
    (segment,) = get(url, f"/v1/trajectories/{talk}").json()["segments"]
    assert sampled(segment) == [*heard.ids(0), *heard.ids(1)]


def test_rewards_are_kept(url: str) -> None:
    result = post(url, "/v1/responses", {"input": "hi"}).json()["id"]
    post(url, f"/v1/trajectories/{result}", {"reward": 0.5})
    reply = post(url, f"/v1/trajectories/{result}", {"rewards": {"form": 1.0}}).json()
    assert reply["rewards"] == get(url, f"/v1/trajectories/{result}").json()["rewards"]
    assert reply["rewards"] == {"reward": 0.5, "form": 1.0}


def test_rewards_do_not_grow_without_end(url: str) -> None:
    result = post(url, "/v1/responses", {"input": "hi"}).json()["id"]
    path = f"/v1/trajectories/{result}"
    post(url, path, {"rewards": {str(number): 1.0 for number in range(64)}})
    assert post(url, path, {"rewards": {"one more": 1.0}}).status_code == 400
    assert len(get(url, path).json()["rewards"]) == 64


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_it_is_deleted_with_its_answer(url: str, path: str) -> None:
    result = post(
        url, path, {"input": "hi"} if "resp" in path else {"messages": [USER], "store": True}
    ).json()["id"]
    delete(url, f"{path}/{result}")
    assert get(url, f"/v1/trajectories/{result}").status_code == 404


def test_what_was_not_kept_is_not_there(serve: Serve, heard: JobRecorder) -> None:
    url = serve(tool_model(heard.answer), store="memory")
    result = post(url, "/v1/responses", {"input": "hi"}).json()["id"]
    assert get(url, f"/v1/trajectories/{result}").status_code == 404


def test_a_client_may_ask_for_it(serve: Serve, heard: JobRecorder) -> None:
    url = serve(tool_model(heard.answer), store="memory")
    result = post(url, "/v1/responses", {"input": "hi", "return_token_ids": True}).json()["id"]
    (segment,) = get(url, f"/v1/trajectories/{result}").json()["segments"]
    assert sampled(segment) == heard.ids(0)


@pytest.mark.parametrize(("where", "name"), [("http.routes", "MOST_BYTES"), ("api", "MOST_IDS")])
def test_a_trajectory_has_a_size(
    url: str, heard: JobRecorder, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    body = post(url, "/v1/responses", {"input": "hi"}).json()
    path = f"/v1/trajectories/{body['id']}"
    assert get(url, path).status_code == 200
    monkeypatch.setattr(f"dragoman.{where}.training.{name}", 10)
    reply = get(url, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "limit_exceeded")


DROPS = TEMPLATE.replace(
    "{% if message.reasoning_content %}", "{% if message.reasoning_content and loop.last %}"
)
"""Earlier reasoning is gone once somebody speaks."""
THOUGHT = "<think>\nHm.\n</think>\nHello."


def forgetful(serve: Serve, heard: JobRecorder, **settings: Any) -> str:
    model = tool_model(heard.answer)
    model.card = replace(model.card, templates={"default": DROPS})
    return serve(model, dialect="hermes", store="memory", trajectories=True, **settings)


def chatted(url: str, **fields: Any) -> dict[str, Any]:
    """Two turns of a client that drops reasoning; the trajectory of the second."""
    result = post(url, "/v1/chat/completions", {"messages": [USER], **fields}).json()["choices"][0]["message"]
    answer = {"role": "assistant", "content": result["content"]}
    second = post(url, "/v1/chat/completions", {"messages": [USER, answer, USER], **fields}).json()
    body: dict[str, Any] = get(url, f"/v1/trajectories/{second['id']}").json()
    return body


@pytest.mark.parametrize(("setting", "field"), [("template", "sampled"), ("sampled", None)])
def test_a_history_as_it_was_sampled_is_one_sequence(serve: Serve, setting: str, field: str | None) -> None:
    heard = JobRecorder(THOUGHT, "Bye.")
    url = forgetful(serve, heard, history=setting)
    (segment,) = chatted(url, **({"history": field} if field else {}))["segments"]
    assert sampled(segment) == [*heard.ids(0), *heard.ids(1)]
    assert (segment["histories"], segment["split"]) == (["sampled"] * 2, None)
    assert heard.jobs[1].prompt[: len(segment["ids"]) - 5] == tuple(segment["ids"][:-5])


def test_a_response_may_have_its_history_as_it_was_sampled(serve: Serve) -> None:
    heard = JobRecorder(THOUGHT, "Bye.")
    url = forgetful(serve, heard)
    first = post(url, "/v1/responses", {"input": "hi"}).json()["id"]
    more = {"previous_response_id": first, "history": "sampled"}
    second = post(url, "/v1/responses", {"input": "hi", **more}).json()["id"]
    (segment,) = get(url, f"/v1/trajectories/{second}").json()["segments"]
    assert segment["histories"] == ["template", "sampled"]


def test_a_sequence_that_was_split_says_why(serve: Serve) -> None:
    heard = JobRecorder(THOUGHT, "Bye.")
    first, second = chatted(forgetful(serve, heard))["segments"]
    assert (first["split"], second["split"]) == (None, "template")
    assert second["histories"] == ["template"]


def test_an_operator_decides_how_histories_are(serve: Serve) -> None:
    heard = JobRecorder(THOUGHT, "Bye.")
    url = forgetful(serve, heard, override={"history": "sampled"})
    (segment,) = chatted(url, history="template")["segments"]
    assert segment["histories"] == ["sampled"] * 2


@pytest.mark.parametrize(
    ("said", "fields"),
    [("Hello. STOP it", {"stop": ["STOP"]}), (call("f", a=1), {}), ("Hello", {"max_tokens": 3})],
    ids=["a stop string", "a call that nobody asked for", "cut short"],
)
def test_what_the_client_was_not_told_is_in_a_sampled_history(
    serve: Serve, said: str, fields: dict[str, Any]
) -> None:
    heard = JobRecorder(said, "Bye.")
    url = forgetful(serve, heard, restore_reasoning="off")
    (segment,) = chatted(url, history="sampled", **fields)["segments"]
    assert len(segment["answers"]) == 2
    assert bytes(id_ for id_ in sampled(segment) if id_ < 256).startswith(said.encode()[:3])
    assert segment["ids"].count(END_ID) >= 3, "of two questions, and of the answer"
