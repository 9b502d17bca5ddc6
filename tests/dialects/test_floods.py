"""What a model repeats without end, or is made to repeat, costs time in proportion to its length."""

import time

import pytest

from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from tests.support.dialects import NAMES, TOOLS, markers

pytestmark = pytest.mark.thorough

# Far more than a linear reading takes on a slow machine, and far less than anything else.
MOST_SECONDS = 5.0
LONG = 100_000

# dialect, how it begins, what is repeated
FLOODS = [
    ("hermes", "<tool_call>", '{"name": '),
    ("hermes", '<tool_call>{"name": "f", "arguments": {', '"a": 1, '),
    ("hermes", '<tool_call>{"name": "f", "arguments": ', '{"a":'),
    ("hermes", '<tool_call>{"name": "', "x"),
    ("hermes", "<tool_call>", " "),
    ("json", "", "["),
    ("json", "", '{"name": "f", '),
    ("xlam", '[{"name": "f", "arguments": {"a": "', "\\n"),
    ("pythonic", "", "[f("),
    ("pythonic", "[f(a=", "1"),
    ("pythonic", "[f(a=", "1_"),
    ("pythonic", "[f(a='", "\\\\"),
    ("lfm2", "<|tool_call_start|>[f(a=", "["),
    ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>"),
    ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>1</parameter>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>", "</parameter> "),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>", "<parameter=o"),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>", "<parameter=x>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>", "</function></tool_call> "),
    ("hermes", "", '{"name": "f", "arguments": {}}\n'),
    ("hermes", '```json\n{"name": "f", "arguments": {"a": "', "x"),
    ("hermes", '<tool_call>{"name": "f", ', '"x": 1, '),
    ("glm45", "<tool_call>f", "<arg_key>a</arg_key>"),
    ("gemma4", "<|tool_call>call:f{a:", "["),
    ("gemma4", "<|tool_call>call:f{", "a:1,"),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>"),
    ("minicpm5", '<function name="f"><param name="a"><![CDATA[', "]]"),
    ("harmony", "", "<|channel|>analysis"),
    ("harmony", "<|channel|>", "to=x "),
    ("muse_glimmer", " to=x<|message|>", "<atem:function_calls>y "),
    ("kimi_k2", "<|tool_calls_section_begin|>", "x<|tool_call_begin|>"),
    ("kimi_k3", '<|open|>call tool="', 'a" index="'),
    ("kimi_k2", "", "<|tool_call_begin|>functions.f:0"),
    ("cohere_command3", "", "</co: "),
]


def seconds(dialect: str, text: str, size: int) -> float:
    parser = Parser(dialect, TOOLS)
    start = time.process_time()
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.finish()
    return time.process_time() - start


@pytest.mark.parametrize("size", [4, LONG * 2], ids=["small pieces", "one piece"])
@pytest.mark.parametrize(("dialect", "beginning", "repeated"), FLOODS)
def test_a_flood_is_read_in_time(dialect: str, beginning: str, repeated: str, size: int) -> None:
    assert seconds(dialect, beginning + repeated * (LONG // len(repeated)), size) < MOST_SECONDS


@pytest.mark.parametrize("dialect", NAMES)
def test_markers_without_end_are_read_in_time(dialect: str) -> None:
    for mark in markers(get_dialect(dialect)):
        assert seconds(dialect, mark * (10_000 // len(mark)), 10_000) < MOST_SECONDS / 5, mark


@pytest.mark.parametrize(
    "digits", ["9" * 20_000 + "x", "0x" + "f" * 20_000, "1" * 20_000, "1e" + "9" * 20_000]
)
def test_a_long_number_is_read_in_time(digits: str) -> None:
    assert seconds("pythonic", f"[f(a={digits})]", LONG) < MOST_SECONDS / 5
