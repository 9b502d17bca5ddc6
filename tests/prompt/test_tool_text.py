"""Tools for templates that have no place for them."""

from dragoman.dialects.registry import get_dialect
from dragoman.engines.protocol import ModelCard
from dragoman.prompt import PromptBuilder
from dragoman.types import Conversation, Message, ToolCall
from tests.prompt.support import ByteTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_TOOL_ROLE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHATML
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = ToolCall(id="c1", name="look", arguments='{"at": "sky"}')
HISTORY = (
    Message(role="user", content="Rain?"),
    Message(role="assistant", content="I look.", tool_calls=(CALL,)),
    Message(role="tool", content="clouds", tool_call_id="c1", name="look"),
)


def prompt(template: str, messages: tuple[Message, ...] = HISTORY, dialect: str = "hermes") -> str:
    card = ModelCard(name="m", max_model_len=9, templates={"default": template})
    builder = PromptBuilder(card, ByteTokenizer(), dialect=get_dialect(dialect))
    return builder.text(Conversation(messages=messages, tools=(TOOL,)))


def test_the_model_is_told_of_the_tools() -> None:
    assert '{"name":"look","parameters":{"type":"object"}}' in prompt(CHATML)


def test_the_model_is_told_how_to_call_in_its_dialect() -> None:
    assert "<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>" in prompt(
        CHATML, dialect="qwen3_coder"
    )


def test_calls_of_the_history_are_written_in_its_dialect() -> None:
    wanted = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>'
    assert wanted in prompt(CHATML)


def test_results_keep_their_role_where_there_is_one() -> None:
    assert "<|im_start|>tool\nclouds<|im_end|>" in prompt(CHATML)


def test_results_come_from_the_user_where_there_is_none() -> None:
    assert "[user] Result of look:\nclouds" in prompt(NO_TOOL_ROLE)


def test_calls_are_left_to_a_template_that_writes_them() -> None:
    calls = "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    writes_calls = CHATML.replace("{{ m.content }}", calls)
    assert "<tool_call>\n{" not in prompt(writes_calls).partition("I look.")[2]


def test_the_system_message_of_the_client_stays() -> None:
    system = Message(role="system", content="Be brief.")
    assert "Be brief." in prompt(CHATML, (system, *HISTORY))


def test_a_template_that_shows_tools_is_left_alone() -> None:
    assert "You can call these functions" not in prompt(WITH_TOOLS)


def test_nothing_is_said_to_a_model_that_knows_no_calls() -> None:
    assert "You can call these functions" not in prompt(CHATML, dialect="plain")
