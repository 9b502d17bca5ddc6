"""What a template writes for an answer is read back: with the dialect found, and with a derived one."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.declarations import (
    BraceCalls,
    Dialect,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
)
from dragoman.dialects.parser import parse
from dragoman.dialects.render import render
from dragoman.engines.protocol import ModelCard
from dragoman.errors import BadRequest, TemplateError
from dragoman.prompt import PromptBuilder
from dragoman.prompt.derive import examine
from dragoman.prompt.find import find_dialect
from dragoman.prompt.probe import common_prefix, segments, shared_end
from dragoman.types import Answer, Conversation, Message, ToolCall
from tests.prompt.support import SHARED, TEMPLATES, ByteTokenizer

PUBLISHED = SHARED / "templates"
OWN = (path for folder in ("families", "unseen") for path in (TEMPLATES / folder).glob("*.jinja"))
PATHS = [*sorted(OWN), *sorted(PUBLISHED.glob("*.jinja"))]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
THOUGHT, SAID, ASKED = "Hm, hm.", "Let me look.", "Rain?"

NOT_DERIVED = {
    "Kimi-K3": "the opening tag of a call counts the calls",
    "MiniMax-M3": "the tags of arguments are named after them",
    "meetkai-functionary-medium-v3.2": "the prompt ends with the marker of the first call",
    "muse-glimmer": "a call's name is written twice",
}
NOT_WHOLE = {
    "Apriel-1.6-15b-Thinker-fixed": "history has no mark where reasoning begins; only the prompt has",
    "NVIDIA-Nemotron-Nano-v2": "the last answer's text is written into reasoning that is never closed",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "text is written after the calls, as a turn of its own",
}

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "description": "A city."},
    "days": {"type": "integer", "description": "How many."},
    "exact": {"type": "boolean", "description": "Whether."},
    "units": {"type": "array", "description": "Which.", "items": {"type": "string"}},
}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
    for name in ("get_weather", "get_time")
)
FIRST = ToolCall(
    id="abc123def",
    name="get_weather",
    arguments='{"city": "São \\"Paulo\\" <b>", "days": 2, "exact": true, "units": ["C", "F"]}',
)
SECOND = ToolCall(id="abc123deg", name="get_time", arguments='{"city": "Rome"}')
ANSWERS = {
    "one call": Message(role="assistant", tool_calls=(FIRST,)),
    "two calls": Message(role="assistant", tool_calls=(FIRST, SECOND)),
    "no arguments": Message(
        role="assistant", tool_calls=(ToolCall(id="abc123def", name="get_time", arguments="{}"),)
    ),
    "everything": Message(role="assistant", content=SAID, reasoning=THOUGHT, tool_calls=(FIRST, SECOND)),
}


@cache
def prompter_of(source: str) -> PromptBuilder:
    card = ModelCard(name="m", max_model_len=9, templates={"default": source})
    return PromptBuilder(card, ByteTokenizer(special=("<s>", "</s>")))


def written(source: str, answer: Message) -> str | None:
    """What a template writes for an answer, after what the prompt ends with; None if it leaves calls out."""
    texts = [_text(prompter_of(source), messages) for messages in ((answer,), ())]
    whole, prompt = (text.rpartition(ASKED)[2] if text else "" for text in texts)
    body = whole[len(common_prefix(whole, prompt)) :]
    return body if body and all(call.name in body for call in answer.tool_calls) else None


def _text(prompter: PromptBuilder, more: tuple[Message, ...]) -> str | None:
    for tools in (TOOLS, ()):
        conversation = Conversation(
            messages=(Message(role="user", content=ASKED), *more),
            tools=tools,
            add_generation_prompt=not more,
            template_kwargs={"enable_thinking": True, "thinking": True},
        )
        try:
            return prompter.text(conversation)
        except (BadRequest, TemplateError):
            continue
    return None


def read(body: str, dialect: Dialect) -> Answer:
    """The prompt of some templates has already opened reasoning."""
    opens = dialect.reasoning.open if dialect.reasoning else ("",)
    before, thought, _ = body.partition(THOUGHT)
    return parse(body, dialect, TOOLS, bool(thought) and not any(mark.strip() in before for mark in opens))


def plain(calls: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def check(path: Path, dialect: Dialect) -> int:
    source, tried = path.read_text(), 0
    for name, answer in ANSWERS.items():
        body = written(source, answer)
        if body is None or (name == "everything" and path.stem in NOT_WHOLE):
            continue
        tried += 1
        result = read(body, dialect)
        assert plain(result.calls) == plain(answer.tool_calls), (name, body)
        if THOUGHT in body:
            assert result.reasoning.strip() == THOUGHT, (name, body)
        if SAID in body:
            assert result.text.strip().startswith(SAID), (name, body)
    return tried


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_found_dialect_reads_what_the_template_writes(path: Path) -> None:
    dialect = find_dialect(template=path.read_text(), bos_token="<s>", eos_token="</s>")
    check(path, dialect.dialect)


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_derived_dialect_reads_what_the_template_writes(path: Path) -> None:
    examined = examine(path.read_text(), SPECIAL)
    assert examined is not None
    dialect = examined.dialect()
    writes_calls = written(path.read_text(), ANSWERS["one call"]) is not None
    if path.stem in NOT_DERIVED or not writes_calls:
        assert dialect is None or not dialect.calls
    else:
        assert dialect is not None
        assert dialect.calls
        assert check(path, dialect) > 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("object_in_tags", JsonCalls),
        ("objects_in_one_list", JsonCalls),
        ("objects_in_a_section", JsonCalls),
        ("name_is_the_key", JsonCalls),
        ("one_call_at_most", JsonCalls),
        ("name_then_object", NamedCalls),
        ("id_then_name", NamedCalls),
        ("arguments_as_text", NamedCalls),
        ("keys_and_values", TaggedCalls),
        ("typed_values", TaggedCalls),
        ("python_in_markers", PythonCalls),
        ("braces", BraceCalls),
    ],
)
def test_shapes(name: str, kind: type) -> None:
    examined = examine((TEMPLATES / "unseen" / f"{name}.jinja").read_text())
    dialect = examined.dialect() if examined else None
    assert dialect is not None
    assert isinstance(dialect.calls[0], kind)


def derived(source: str) -> Dialect:
    examined = examine(source)
    dialect = examined.dialect() if examined else None
    assert dialect is not None
    return dialect


@pytest.mark.parametrize("path", sorted((TEMPLATES / "unseen").glob("*.jinja")), ids=lambda path: path.stem)
def test_a_derived_dialect_can_be_written(path: Path) -> None:
    dialect = derived(path.read_text())
    answer = Answer(
        text=SAID,
        reasoning=THOUGHT if dialect.reasoning else "",
        calls=[SECOND, ANSWERS["no arguments"].tool_calls[0]] if dialect.calls else [],
    )
    result = parse(render(dialect, answer), dialect)
    assert plain(result.calls) == plain(answer.calls)
    assert (result.text.strip(), result.reasoning.strip()) == (answer.text, answer.reasoning)


def test_a_section_is_told_from_a_call() -> None:
    (calls,) = derived((TEMPLATES / "unseen" / "name_then_object.jinja").read_text()).calls
    assert calls.open == ("<run>",)
    assert calls.close == ("</run>",)
    assert calls.section is not None
    assert (calls.section.open, calls.section.close) == (("<tools>",), ("</tools>",))


def test_ids_are_kept() -> None:
    source = (TEMPLATES / "unseen" / "id_then_name.jinja").read_text()
    body = written(source, ANSWERS["two calls"])
    assert body is not None
    assert [call.id for call in parse(body, derived(source)).calls] == [FIRST.id, SECOND.id]


@pytest.mark.parametrize(
    ("writes", "opened", "close"),
    [
        ("<ponder>{{ m.reasoning_content }}</ponder>\n", "<ponder>", "</ponder>\n"),
        ("<|a|>mind\n{{ m.reasoning_content }}<|z|>", "<|a|>mind\n", "<|z|>"),
        ("[MIND]{{ m.reasoning }}[/MIND]", "[MIND]", "[/MIND]"),
    ],
)
def test_reasoning(writes: str, opened: str, close: str) -> None:
    condition = "{% if m.reasoning or m.reasoning_content %}" + writes + "{% endif %}"
    source = "{% for m in messages %}<|{{ m.role }}|>" + condition + "{{ m.content }}<|end|>{% endfor %}"
    reasoning = derived(source).reasoning
    assert reasoning is not None
    assert reasoning.open == (opened,)
    assert reasoning.close == (close,)


def test_markers_around_text_are_no_text() -> None:
    answer = (
        "{% if m.tool_calls %}<use>{{ m.tool_calls[0].function | tojson }}</use>"
        "{% else %}<say>{{ m.content }}</say>{% endif %}"
    )
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "{{ m.content }}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    dialect = derived(source)
    assert dialect.drops == ("<say>", "</say>")
    assert parse("<say>hi</say>", dialect).text == "hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('never') }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "always the same",
        "",
    ],
)
def test_what_cannot_be_derived(source: str) -> None:
    examined = examine(source)
    assert examined is not None
    assert examined.dialect() is None


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a' * 10**9 }}"])
def test_what_cannot_be_compiled_or_comes_to_no_end(source: str) -> None:
    assert examine(source) is None


@given(one=st.text("<a>/| [X]\n", max_size=12), other=st.text("<a>/| [X]\n", max_size=12))
def test_ends_are_shared_in_whole_segments(one: str, other: str) -> None:
    start, end = common_prefix(one, other), shared_end(one, other)
    assert one.startswith(start)
    assert other.startswith(start)
    assert one.endswith(end)
    assert other.endswith(end)
    assert "".join(segments(one)) == one
