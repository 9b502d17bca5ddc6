"""`response_template`: what Hugging Face itself reads, under every cut, and errors that name the place."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.response_template import ResponseTemplate
from dragoman.errors import SettingsError
from dragoman.types import Answer, Event, coalesce, fold

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
HERMES: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}
TAGGED: dict[str, Any] = {
    "start_anchor_pattern": r"<\|bot\|>\s?",
    "fields": {
        "reasoning_content": {"open": ["<think>", "<think>\n"], "close": "</think>"},
        "content": {"close": ["<end>", "<end of turn>"]},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            },
            "transform": FUNCTION,
        },
    },
}
GEMMA: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": FUNCTION,
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
    },
}
LISTED: dict[str, Any] = {
    "start_anchor": "BOT:",
    "fields": {
        "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
        "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
        "tool_calls": {
            "open": "<action>",
            "close": "</action>",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
SPOKEN: list[tuple[dict[str, Any], str, str]] = [
    (HERMES, "<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nHello <b>you</b>.<|im_end|>"),
    (HERMES, "x<|im_start|>assistant\n<think>\n", "so\n</think>\n\nYes.\n<|im_end|>"),
    (HERMES, "", 'One.\n<tool_call>\n{"name": "f", "arguments": {"a": 1.0}}\n</tool_call>'),
    (
        HERMES,
        "",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
    ),
    (HERMES, "", "a <too and </thin and <tool_call"),
    (TAGGED, "<|bot|> ", "<think>\nt</think>Text <end of turn>"),
    (
        TAGGED,
        "q<|bot|>",
        "Well <tool_call>\n<function=f>\n<parameter=city>\nNew York\n</parameter>\n<parameter=n>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    (
        GEMMA,
        "<|turn>model\n",
        '<|channel>thought\nmm<channel|>Hi<|tool_call>call:f{a:<|"|>x:{y<|"|>,n:[1,{k:2}]}<tool_call|>',
    ),
    (GEMMA, "", "just text<turn|>"),
    (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>c",
    ),
    (CHANNELS, "", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": [1, 2]}<|call|>'),
    (LISTED, "BOT:", "thinking</think><response>\nHello\nyou\n</response>"),
    (
        LISTED,
        "BOT:",
        'r</think><action>[{"tool_name": "f", "parameters": {"x": 1}}, '
        '{"tool_name": "g", "parameters": {}}]</action>',
    ),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]


def answer(template: dict[str, Any], pieces: list[str], prompt: str = "", tools: Any = ()) -> Answer:
    reader = ResponseTemplate.load(template).reader(prompt, tools)
    events: list[Event] = []
    for piece in pieces:
        events += reader.feed(piece)
    return fold([*events, *reader.finish()])


def told(said: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    return said.text, said.reasoning, [(call.name, call.arguments) for call in said.calls]


@pytest.mark.parametrize(("template", "prompt", "text"), SPOKEN)
def test_what_hugging_face_reads(template: dict[str, Any], prompt: str, text: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    expected = parsing.parse_response(text, template, prefix=prompt, tools=TOOLS)
    result = answer(template, [text], prompt, TOOLS)
    calls = [one["function"] for one in expected.get("tool_calls", [])]
    assert result.text == expected.get("content", "")
    assert result.reasoning == expected.get("thinking", expected.get("reasoning_content", ""))
    assert [(one.name, json.loads(one.arguments)) for one in result.calls] == [
        (one["name"], one.get("arguments", {})) for one in calls
    ]


@given(st.sampled_from(SPOKEN), st.integers(0, 200), st.lists(st.integers(0, 200)))
def test_cuts_change_nothing(spoken: tuple[dict[str, Any], str, str], end: int, cuts: list[int]) -> None:
    template, prompt, text = spoken
    text = text[: max(len(text) - end, 0)] if end % 3 == 0 else text
    offsets = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(offsets)]
    whole = told(answer(template, [text], prompt))
    assert told(answer(template, pieces, prompt)) == whole
    assert told(answer(template, list(text), prompt)) == whole


@given(st.sampled_from([HERMES, TAGGED, GEMMA, CHANNELS, LISTED]), st.data())
def test_any_text_is_read_alike(template: dict[str, Any], data: st.DataObject) -> None:
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "<function=f>", "<end>"]
    marks += [
        "<|tool_call>call:f",
        "<tool_call|>",
        "{a:1}",
        "<|channel|>final<|message|>",
        "<|end|>",
        "</function>",
    ]
    parts = data.draw(st.lists(st.one_of(st.sampled_from(marks), st.text(alphabet="<|>a \n{", max_size=4))))
    text = "".join(parts)
    whole = told(answer(template, [text]))
    assert told(answer(template, parts)) == whole == told(answer(template, list(text)))


VERBATIM = {"repeats": True, "join": "", "content_args": {"strip": False}}
SOUP: dict[str, Any] = {
    "start_anchor": ":",
    "fields": {
        "thinking": {"open": ["<t>", "<t>\n"], "close_pattern": r"\s*</t>", **VERBATIM},
        "content": {"close_pattern": r"\n?<e>", **VERBATIM},
        "tool_calls": {
            "open_pattern": r"(?:^|<c) ?(?P<name>\w+)\b[^>]*?>",
            "close": ["</c>", "</c>;"],
            "repeats": True,
            "transform": FUNCTION,
        },
    },
}
PARTS = ["<t>", "</t>", "<t>\n", "\n", "<c f>", "<c f x", "</c>", ";", "<e>", "a", " ", ">", "<"]


@given(st.lists(st.sampled_from(PARTS), max_size=14))
def test_any_text_is_what_hugging_face_reads(parts: list[str]) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    expected = parsing.parse_response("".join(parts), SOUP, prefix="")
    result = answer(SOUP, parts)
    calls = [one["function"] for one in expected.get("tool_calls", [])]
    assert (result.text, result.reasoning) == (expected.get("content", ""), expected.get("thinking", ""))
    assert [(one.name, one.arguments) for one in result.calls] == [
        (one["name"], one["arguments"] or "{}") for one in calls
    ]


def test_text_and_reasoning_come_as_they_are_written() -> None:
    reader = ResponseTemplate.load(HERMES).reader("<|im_start|>assistant\n<think>\n")
    items = [
        coalesce(list(reader.feed(piece))) for piece in ("I ", "see", ".\n</th", "ink>\n\nYes", ", <b", ">")
    ]
    assert [[(one.kind, one.text) for one in events] for events in items] == [
        [("reasoning", "I")],
        [("reasoning", " see")],
        [("reasoning", ".")],
        [("text", "Yes")],
        [("text", ", <b")],
        [("text", ">")],
    ]


def test_json_arguments_are_the_bytes_of_the_model() -> None:
    text = '<tool_call>{"arguments": {"b":  -1.5e3,"a": "\\u00e9"} , "name": "f"}</tool_call>'
    assert answer(HERMES, [text], tools=TOOLS).calls[0].arguments == '{"b":  -1.5e3,"a": "\\u00e9"}'


def test_tagged_arguments_have_the_types_of_the_schema() -> None:
    tags = "<parameter=city>12</parameter><parameter=n>12</parameter>"
    text = f"<tool_call><function=f>{tags}</function></tool_call>"
    assert answer(TAGGED, [text], tools=TOOLS).calls[0].arguments == '{"city": "12", "n": 12}'
    assert answer(TAGGED, [text]).calls[0].arguments == '{"city": "12", "n": "12"}'


def test_text_between_calls_is_kept() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert told(answer(HERMES, [f"A.\n{call}\nB.\n{call}\n"])) == ("A.\n\nB.", "", [("f", "{}")] * 2)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "argu',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert told(answer(HERMES, [text])) == (text, "", [])


def test_arguments_that_are_cut_off_are_told_where_the_name_is_known() -> None:
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1, "b'
    assert told(answer(CHANNELS, [text])) == ("", "", [("f", '{"a": 1, "b')])


def test_prefilled_words_are_not_repeated() -> None:
    result = answer(HERMES, [" world."], "<|im_start|>assistant\nHello ")
    assert result.text == " world."


def test_joined_texts() -> None:
    thinking = {"open": "<t>", "close": "</t>", "repeats": True, "join": "; "}
    template = {"start_anchor": ":", "fields": {"thinking": thinking, "content": {}}}
    assert told(answer(template, ["<t> a </t>x<t> b</t>"])) == ("x", "a; b", [])


def test_a_template_may_add_arguments_of_its_own() -> None:
    arguments = {"text": "{content}", "loud": True, "level": None}
    calls = {"open": "<say>", "close": "</say>", "transform": {"name": "say", "arguments": arguments}}
    template = {"start_anchor": ":", "fields": {"tool_calls": calls}}
    call = answer(template, ["<say> hi </say>"]).calls[0]
    assert (call.name, call.arguments) == ("say", '{"text": "hi", "loud": true, "level": null}')


def test_lines_of_keys() -> None:
    calls = {
        "open_pattern": r"CALL (?P<name>\w+)\n",
        "close": "END",
        "content": "kv-lines",
        "content_args": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
        "transform": FUNCTION,
    }
    template = {
        "start_anchor": ":",
        "fields": {"tool_calls": calls, "content": {"content_args": {"strip": False}}},
    }
    assert told(answer(template, [" hi CALL f\na: 1\nb: x y\nEND "])) == (
        " hi  ",
        "",
        [("f", '{"a": 1, "b": "x y"}')],
    )


def test_a_marker_that_never_ends_is_given_up() -> None:
    text = "<|channel|>commentary to=functions.f" + "x" * 20_000
    assert told(answer(CHANNELS, [text])) == ("", "", [])
    long = "<tool_call>" + " " * 20_000 + "a"
    assert answer(TAGGED, [long]).text == long


def test_long_answers_take_one_pass() -> None:
    text = "<tool_call><function=f><parameter=city>" + "a b " * 25_000 + "</parameter></function></tool_call>"
    began = time.perf_counter()
    result = answer(TAGGED, [text[at : at + 4] for at in range(0, len(text), 4)], tools=TOOLS)
    assert len(json.loads(result.calls[0].arguments)["city"]) == 99_999
    assert time.perf_counter() - began < 5.0


def with_field(**changes: Any) -> dict[str, Any]:
    return {**HERMES, "fields": {"content": {**changes}}}


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ({**HERMES, "version": 2}, "version"),
        ({**HERMES, "extra": 1}, "extra"),
        ({**HERMES, "fields": {}}, "fields"),
        (with_field(repeats="x"), r"fields\.content\.repeats: Expected `bool`"),
        ({"fields": {"content": {}}}, "start_anchor"),
        ({**HERMES, "start_anchor": ""}, "non-empty"),
        ({**HERMES, "fields": {"plan": {}}}, "plan"),
        ({**HERMES, "fields": {"content": {}, "thinking": {}}}, "content and thinking"),
        (with_field(opne="x"), "opne"),
        (with_field(open="x", open_pattern="y"), "both"),
        (with_field(close_pattern="x*"), "empty"),
        (with_field(close_pattern="(x"), "closed"),
        (with_field(content="yaml"), "yaml"),
        (with_field(content_args={"trim": True}), "trim"),
        (with_field(content="xml-inline", content_args={"tag_pattern": "x"}), "key"),
        (with_field(join=", "), "repeats"),
        (with_field(open_pattern="<(?P<name>x)>"), "transform"),
        (with_field(transform="a {content}"), "placeholder"),
        (with_field(transform_each=True), "transform_each"),
    ],
)
def test_what_is_wrong_is_named_when_it_is_loaded(template: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        ResponseTemplate.load({"response_template": template})
