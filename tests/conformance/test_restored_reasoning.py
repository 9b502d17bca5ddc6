"""OpenAI's own client drops reasoning: the model is shown what it would be if the client sent it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from dragoman.engines.local import LocalEngine
from dragoman.engines.scripted import Script, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.support.engines import SharedEngine
from tests.support.parrot import TEMPLATE
from tests.support.tool_model import call, prompt_of, tool_model

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 4}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
ASK = {"role": "user", "content": "Rain?"}
LOOPS = 2


def answer(job: Job) -> Script:
    """Two calls at once, one alone, then the answer, with a thought before each."""
    looked = prompt_of(job).rpartition("user\n")[2].count("\ntool\n")
    thought = f"<think>\nI have looked {looked} times: <|im_start|>.\n</think>\n"
    if looked < 3:
        calls = [call("look", at=str(looked + number)) for number in range(1 if looked else 2)]
        return say(thought + "\n".join(["I look.", *calls]))
    return say(thought + "It rains.")


@pytest.fixture(scope="module")
def scripted() -> Iterator[OpenAI]:
    with (
        background(
            tool_model(answer), Settings(port=0, store="memory", dialect="hermes", any_model=True)
        ) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as client,
    ):
        yield client


class Chat:
    """A loop of calls over Chat Completions; a client that `sends` reasoning asks for none to be restored."""

    def __init__(self, client: OpenAI, *, sends: bool, restoring: str | None, salt: str, **more: Any) -> None:
        self._create, self._sends = client.chat.completions.create, sends
        self._more = {
            "model": "any",
            "tools": [{"type": "function", "function": TOOL}],
            **more,
            "extra_body": {
                **more.get("extra_body", {}),
                "cache_salt": salt,
                "return_token_ids": True,
                **({} if restoring is None else {"restore_reasoning": restoring}),
            },
        }
        self.messages: list[Any] = []
        self.prompts: list[list[int]] = []
        self.restored: list[int] = []

    def user(self, turns: int = 4) -> None:
        self.messages.append(ASK)
        for _ in range(turns):
            result = self._create(messages=self.messages, **self._more)
            self.prompts.append(result.prompt_token_ids)
            details = result.usage.prompt_tokens_details
            self.restored.append(getattr(details, "restored_reasoning_tokens", 0))
            outcome = result.choices[0].message
            message = {"role": "assistant", "content": outcome.content}
            if outcome.tool_calls:
                message["tool_calls"] = [each.model_dump(exclude_none=True) for each in outcome.tool_calls]
            if self._sends:
                message["reasoning_content"] = outcome.reasoning_content
            self.messages.append(message)
            for each in outcome.tool_calls or ():
                self.messages.append({"role": "tool", "tool_call_id": each.id, "content": "wet"})
            if not outcome.tool_calls:
                break


def test_a_loop_of_calls_has_its_thoughts(scripted: OpenAI) -> None:
    drops = Chat(scripted, sends=False, restoring=None, salt="drops")
    sends = Chat(scripted, sends=True, restoring="off", salt="sends")
    for chat in (drops, sends):
        chat.user()
    assert drops.prompts == sends.prompts
    assert [count > 0 for count in drops.restored] == [False, True, True]
    assert sends.restored == [0, 0, 0]


def test_thoughts_of_all_answers(scripted: OpenAI) -> None:
    drops = Chat(scripted, sends=False, restoring="all", salt="drops all")
    sends = Chat(scripted, sends=True, restoring="off", salt="sends all")
    for chat in (drops, sends):
        for _ in range(LOOPS):
            chat.user()
    assert (drops.prompts, len(drops.prompts)) == (sends.prompts, 3 * LOOPS)


def test_without_them_the_prompts_are_others(scripted: OpenAI) -> None:
    off = Chat(scripted, sends=False, restoring="off", salt="off")
    sends = Chat(scripted, sends=True, restoring="off", salt="sends again")
    for chat in (off, sends):
        chat.user()
    assert off.prompts[0] == sends.prompts[0] and off.prompts[1:] != sends.prompts[1:]


def streamed(client: OpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    """The message of a stream, as clients put it together."""
    text, calls = "", dict[int, Any]()
    for chunk in client.chat.completions.create(messages=messages, stream=True, **more):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.id:
                    function = {"name": part.function.name, "arguments": ""}
                    calls[part.index] = {"id": part.id, "type": "function", "function": function}
                calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    return {"role": "assistant", "content": text, "tool_calls": list(calls.values())}


def test_a_stream_is_remembered_too(scripted: OpenAI) -> None:
    create: Any = scripted.chat.completions.create
    tools = [{"type": "function", "function": TOOL}]
    fields = streamed(scripted, [ASK], model="any", tools=tools)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "wet"} for call in fields["tool_calls"]
    ]
    result = create(model="any", tools=tools, messages=[ASK, fields, *results])
    assert result.usage.prompt_tokens_details.restored_reasoning_tokens > 0


FUNCTION: dict[str, Any] = {"type": "function", **TOOL}


def by_items(client: OpenAI, salt: str, kept: tuple[str, ...], restoring: str) -> list[list[int]]:
    """The prompts of a loop of calls in which the client sends back items of some types only."""
    items: list[Any] = [ASK]
    prompts: list[list[int]] = []
    body = {"cache_salt": salt, "return_token_ids": True, "restore_reasoning": restoring}
    for _ in range(3):
        result: Any = client.responses.create(model="any", input=items, tools=[FUNCTION], extra_body=body)  # type: ignore[list-item]
        prompts.append(result.turns[0]["prompt_token_ids"])
        items += [item.model_dump(exclude_none=True) for item in result.output if item.type in kept]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}
            for item in result.output
            if item.type == "function_call"
        ]
    return prompts


def test_items_without_their_reasoning(scripted: OpenAI) -> None:
    sent = by_items(scripted, "items", ("reasoning", "message", "function_call"), "off")
    assert by_items(scripted, "some items", ("message", "function_call"), "tools") == sent
    assert by_items(scripted, "calls alone", ("function_call",), "tools") != sent


def test_responses_that_are_continued_have_their_reasoning(scripted: OpenAI) -> None:
    """As items, whatever is restored: also of those that are referred to."""
    body = {"return_token_ids": True, "restore_reasoning": "off"}
    create: Any = scripted.responses.create
    first = create(model="any", input=[ASK], tools=[FUNCTION], extra_body=body)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}
        for item in first.output
        if item.type == "function_call"
    ]
    fields: dict[str, Any] = {"model": "any", "tools": [FUNCTION], "extra_body": body}
    chained = create(input=outputs, previous_response_id=first.id, **fields)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    referred = create(input=[ASK, *references, *outputs], **fields)
    some = [{"type": "item_reference", "id": item.id} for item in first.output if item.type != "reasoning"]
    restored = create(
        input=[ASK, *some, *outputs], **{**fields, "extra_body": {**body, "restore_reasoning": "tools"}}
    )
    prompts = [result.turns[0]["prompt_token_ids"] for result in (chained, referred, restored)]
    assert prompts[1:] == prompts[:1] * 2


# A real model: its template opens reasoning, a budget ends it, and the call is required.


@pytest.fixture(scope="module")
def thinking(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    path: Path = tmp_path_factory.mktemp("template") / "thinks.jinja"
    path.write_text(TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    settings = Settings(port=0, store="memory", dialect="hermes", chat_template=str(path), any_model=True)
    with (
        background(SharedEngine(engine), settings) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client,
    ):
        yield client


def test_what_a_real_model_thought_is_given_back(thinking: OpenAI) -> None:
    more = {"temperature": 0, "max_tokens": 40, "tool_choice": "required", "parallel_tool_calls": False}
    budget = {"thinking_token_budget": 8, "cache_prompt": False}
    drops = Chat(thinking, sends=False, restoring=None, salt="drops", extra_body=budget, **more)
    sends = Chat(thinking, sends=True, restoring="off", salt="sends", extra_body=budget, **more)
    for chat in (drops, sends):
        chat.user(turns=2)
    assert drops.prompts == sends.prompts
    assert drops.restored[0] == 0 and all(drops.restored[1:])
