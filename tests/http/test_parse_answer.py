"""An answer read before one's eyes: the dialect and why, the parts and where they stand, the grammar."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.describe import read_parts, write_example
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import list_dialects
from dragoman.engines.scripted import ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.http import get, post

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nYes.\n{CALL}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def url(serve: Serve) -> str:
    return serve(ScriptedEngine(say("x")), dialect="hermes")


def parsed(url: str, **body: Any) -> Any:
    reply = post(url, "/parse", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def spans(told: Any, text: str) -> list[tuple[str, str]]:
    return [(part["kind"], text[part["begin"] : part["end"]]) for part in told["parts"]]


def test_parts_stand_where_they_were_written(url: str) -> None:
    assert spans(parsed(url, text=TEXT), TEXT) == [
        ("reasoning", "<think>\nHm.\n</think>\n\n"),
        ("text", "Yes.\n"),
        ("call", CALL),
    ]


def test_the_message_is_what_the_events_come_to(url: str) -> None:
    message = parsed(url, text=TEXT)["message"]
    [call] = message["tool_calls"]
    assert (message["text"], message["reasoning"]) == ("Yes.", "Hm.")
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')


def test_events_say_how_much_had_been_read(url: str) -> None:
    events = parsed(url, text="Hello", chunk=2)["events"]
    assert events == [
        {"at": at, "kind": "text", "text": text} for at, text in ((2, "He"), (4, "ll"), (5, "o"))
    ]


def test_the_dialect_says_how_it_was_found(url: str) -> None:
    assert parsed(url, text="x")["dialect"]["how"] == "set as dialect"
    named = parsed(url, text="x", dialect="qwen3-coder")["dialect"]
    assert (named["name"], named["how"]) == ("qwen3_coder", "named in the request")


def test_a_template_speaks_for_a_dialect(url: str) -> None:
    result = parsed(url, text="Hm.</think>Yes.", template=TEMPLATE)
    assert result["dialect"]["how"] == "the chat template has <tool_call>"
    assert result["prompt"].endswith("<think>\n")
    assert result["starts_in_reasoning"]
    assert result["message"]["reasoning"] == "Hm."


def test_what_is_wrong_with_a_template_is_said(url: str) -> None:
    assert "error in line 1" in parsed(url, text="x", template="{% for")["template_error"]


def test_the_grammar_is_that_of_the_tools(url: str) -> None:
    result = parsed(url, text="x", tools=TOOLS, return_grammar=True)
    assert "<tool_call>" in result["grammar"]
    assert "grammar" not in parsed(url, text="x")


def test_ids_are_read_as_the_models_own(serve: Serve) -> None:
    engine = ScriptedEngine(say("x"))
    url = serve(engine, dialect="hermes")
    ids = [*engine.tokenizer.encode(f"<think>Hm.</think>Yes.{CALL}"), engine.tokenizer.eos_id]
    result = parsed(url, token_ids=ids)
    texts = ["".join(result["token_strs"][part["begin"] : part["end"]]) for part in result["parts"]]
    kinds = [part["kind"] for part in result["parts"]]
    assert kinds == ["reasoning", "text", "call", "end"]
    assert texts[:3] == ["<think>Hm.</think>", "Yes.", CALL]
    assert result["special"] == [len(ids) - 1]


def test_ids_of_a_prompt_say_that_reasoning_was_opened(serve: Serve) -> None:
    engine = ScriptedEngine(say("x"))
    url = serve(engine, dialect="hermes")
    prompt, ids = engine.tokenizer.encode("<think>\n"), engine.tokenizer.encode("Hm.</think>Yes.")
    result = parsed(url, token_ids=ids, prompt_token_ids=prompt)
    assert result["starts_in_reasoning"]
    assert result["message"]["reasoning"] == "Hm."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "x", "dialect": "nobody"}, "dialect"),
        ({"text": "x", "dialect": "hermes", "template": "x"}, "template"),
        ({"text": "x", "token_ids": [1]}, "text"),
        ({"token_ids": [10**9]}, "token_ids"),
        ({"text": "x" * 20_000, "chunk": 1}, "chunk"),
        ({"text": "x", "chunk": 0}, "chunk"),
        ({"template": "x" * (128 * 1024 + 1)}, "template"),
        ({"text": "x", "txet": 1}, "txet"),
    ],
)
def test_bad_bodies_are_refused(url: str, body: dict[str, Any], param: str) -> None:
    reply = post(url, "/parse", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_the_dialects_are_listed_with_that_of_the_model(url: str) -> None:
    body = get(url, "/dialects").json()
    assert body["model"]["name"] == "hermes"
    assert {each["name"] for each in body["data"]} == set(list_dialects())


def test_ids_have_their_texts_and_say_which_are_special(serve: Serve) -> None:
    engine = ScriptedEngine(say("x"))
    url = serve(engine)
    ids = [*engine.tokenizer.encode("hi"), engine.tokenizer.eos_id]
    body = post(url, "/detokenize", {"tokens": ids, "return_token_strs": True}).json()
    assert body["token_strs"][:2] == ["h", "i"]
    assert body["special"] == [2]


@given(name=st.sampled_from(sorted(list_dialects())), size=st.integers(1, 300))
def test_parts_are_the_same_however_the_text_is_cut(name: str, size: int) -> None:
    dialect = list_dialects()[name]
    text = write_example(dialect) + "\nAnd more."
    _, whole = read_parts(Parser(dialect, TOOLS), [text])
    _, cut = read_parts(Parser(dialect, TOOLS), [text[at : at + size] for at in range(0, len(text), size)])
    assert cut == whole
    assert "".join(text[part.begin : part.end] for part in whole) == text
