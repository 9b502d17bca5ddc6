import json
from typing import Any

import pytest

from dragoman.errors import CONVERSATION, TEMPLATE_KWARGS, BadRequest, TemplateError
from dragoman.types import Conversation, Message, ToolCall
from tests.prompt.support import prompter

SYSTEM = Message(role="system", content="S1")
DEVELOPER = Message(role="developer", content="D2")
USER = Message(role="user", content="hi")
ANSWER = Message(role="assistant", content="yes")


def text(name: str, *messages: Message, **more: Any) -> str:
    return prompter(name).text(Conversation(messages=messages, **more))


def test_developer_is_system_where_it_is_not_known() -> None:
    assert "<|im_start|>system\nD2<|im_end|>" in text("chatml", DEVELOPER, USER)
    assert "<|start|>developer<|message|>D2" in text("channels", DEVELOPER, USER)


def test_systems_stay_where_the_template_takes_them() -> None:
    written = text("chatml", SYSTEM, USER, ANSWER, DEVELOPER, USER)
    assert written.index("S1") < written.index("yes") < written.index("D2")


@pytest.mark.parametrize("name", ["brackets", "channels"])
def test_systems_are_merged_where_one_is_allowed(name: str) -> None:
    assert "S1\n\nD2" in text(name, SYSTEM, USER, ANSWER, DEVELOPER, USER)


def test_systems_go_to_the_user_where_there_is_no_such_role() -> None:
    assert "<start_of_turn>user\nS1\n\nD2\n\nhi<end_of_turn>" in text("turns", SYSTEM, DEVELOPER, USER)
    assert "<start_of_turn>user\nS1<end_of_turn>" in text("turns", SYSTEM)


def test_parts() -> None:
    parts = Message(role="user", content=[{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}])
    assert "user\na\nb<|im_end|>" in text("chatml", parts)
    assert "<|user|>\nab<|end|>" in text("parts_only", parts)
    assert "<|user|>\nhi<|end|>" in text("parts_only", USER)


def test_pictures_are_refused_by_name() -> None:
    picture = Message(role="user", content=[{"type": "image_url", "image_url": {"url": "data:"}}])
    with pytest.raises(BadRequest, match="image_url") as caught:
        text("chatml", picture)
    assert caught.value.param == CONVERSATION
    assert "<|image|>" in text("parts_only", picture)


def calling(arguments: str, **more: Any) -> tuple[Message, ...]:
    call = ToolCall(id="call_0123456789", name="look", arguments=arguments)
    result = Message(role="tool", content="seen", tool_call_id="call_0123456789")
    return USER, Message(role="assistant", tool_calls=(call,), **more), result


def test_arguments_are_parsed_where_an_object_is_wanted() -> None:
    assert '<arg name="k">1</arg>' in text("tagged_tools", *calling('{"k":1}'))
    assert '"parameters": {"k": 1}}' in text("headers", *calling('{"k":1}'))


@pytest.mark.parametrize("arguments", ['{"k":1}', '{"k":   1.50e0}', "{broken", "[1]", ""])
def test_arguments_keep_their_bytes_where_text_is_wanted(arguments: str) -> None:
    assert f"<call look:0>{arguments}</call>" in text("queue", *calling(arguments))


@pytest.mark.parametrize("template", ["headers", "tagged_tools"])
@pytest.mark.parametrize("arguments", ["{broken", "[1]", "broken"])
def test_arguments_that_are_no_object_are_not_lost(template: str, arguments: str) -> None:
    assert arguments in text(template, *calling(arguments))


def test_a_result_gets_its_call_s_name() -> None:
    assert "<tool_response>look: seen</tool_response>" in text("tagged_tools", *calling("{}"))


def test_long_call_ids_are_shortened_the_same_way_everywhere() -> None:
    written = text("brackets", *calling("{}"))
    used = json.loads(written.partition("[TOOL_CALLS]")[2].partition("</s>")[0])[0]["id"]
    assert len(used) == 9
    assert f'"call_id": "{used}"' in written


def test_nothing_is_written_for_null() -> None:
    assert "None" not in text("chatml", *calling("{}"))
    assert "None" not in text("tagged_tools", *calling("{}"))


def test_reasoning() -> None:
    turn = Message(role="assistant", content="yes", reasoning="because")
    assert "<think>\nbecause\n</think>" in text("tagged_tools", USER, USER, turn)


def test_reasoning_beside_content_where_only_one_has_a_place() -> None:
    written = text("channels", *calling("{}", content="So:", reasoning="because"))
    assert "analysis<|message|>because\nSo:<|end|>" in written


def test_refusals_of_the_template_reach_the_client() -> None:
    with pytest.raises(TemplateError, match=r"^Roles alternate: user, assistant, user\.$"):
        text("brackets", USER, USER)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"tokenize": True},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": False},
        {"bos_token": "x"},
        {"raise_exception": 1},
        {"_x": 1},
        {"a b": 1},
        {"x": "y" * 70_000},
        {"x": [[[[[[[[[1]]]]]]]]]},
        {"x": object()},
    ],
)
def test_kwargs_out_of_bounds(kwargs: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        text("chatml", USER, template_kwargs=kwargs)
    assert caught.value.param == TEMPLATE_KWARGS


def test_kwargs_reach_the_template() -> None:
    assert text("tagged_tools", USER, template_kwargs={"enable_thinking": False}).endswith("</think>\n\n")
