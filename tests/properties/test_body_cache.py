"""A body that is recognized says what the same bytes say to whoever reads them all, or is refused alike."""

import json
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.chat import request as chat_request
from dragoman.api.chat.body_cache import BodyCache
from dragoman.api.request_decoder import IgnoredFields, check_shape
from dragoman.api.shared_fields import TurnSpecCache
from dragoman.errors import BadRequest
from dragoman.http.routes.generate import read_terms
from dragoman.limits import Limits
from tests.support.laws import examples

LIMITS = Limits(json_depth=12, json_lists=120, json_names=400, json_values=900)
TEXTS = ("so", 'a "quoted" ], [{', "\\", "ünd \ud800", "", '","messages":[{"role":"user"}]', "{}")
WRONG = (
    {"role": "nobody", "content": "x"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "assistant", "tool_calls": [{"id": "c"}]},
    {"role": "user", "content": "x", "colour": "red"},
    {"role": "user", "content": "x", "name": 7},
)


def message(random: Random) -> dict[str, Any]:
    text = random.choice(TEXTS)
    if random.random() < 0.04:
        return random.choice(WRONG)
    if random.random() < 0.4:
        function = {"name": "f", "arguments": json.dumps({"a": text})}
        return {"role": "assistant", "content": text, "tool_calls": [{"id": "c", "function": function}]}
    content = random.choice((text, [{"type": "text", "text": text}]))
    return {"role": random.choice(("user", "tool", "assistant")), "content": content}


def body(random: Random, messages: list[Any], first: dict[str, Any], last: dict[str, Any]) -> bytes:
    """As clients write it: what stands before the messages, and after them."""
    spaces = random.choice(((",", ":"), (", ", ": "), (" ,\n", " : ")))
    data = json.dumps({**first, "messages": messages, **last}, separators=spaces).encode()
    broken = random.random()
    if broken < 0.02:
        return data.replace(b"]", b",]", 1)
    if broken < 0.04:
        return data[: random.randrange(len(data))]
    if broken < 0.06:
        return data[:-1] + b',"messages":[]}'
    return data


def requests(random: Random) -> list[bytes]:
    messages = [message(random) for _ in range(3)]
    chunks = []
    first: dict[str, Any] = random.choice(({}, {"model": "m", "cache_salt": "s"}))
    last: dict[str, Any] = {"stream": True, "user": "u"}
    for _ in range(12):
        messages = [*messages, *(message(random) for _ in range(random.choice((0, 1, 2))))]
        if random.random() < 0.2:
            offset = random.randrange(len(messages))
            messages = [*messages[:offset], message(random), *messages[offset + 1 :]]
        if random.random() < 0.1:
            others: list[dict[str, Any]] = [
                {},
                {"cache_salt": "other"},
                {"tools": [{"function": {"name": "f"}}]},
            ]
            last = random.choice(others)
        chunks.append(body(random, messages, first, last))
    return chunks


def outcome(read: Any) -> Any:
    ignored = IgnoredFields()
    try:
        request, spec = read(ignored)
    except BadRequest as error:
        return error.message, error.param, error.code
    return request, spec, ignored.summary


def whole(sent: bytes, ignored: IgnoredFields) -> Any:
    check_shape(sent, LIMITS)
    request = chat_request.read(sent, LIMITS, ignored)
    return request, chat_request.spec(request)


def recognized(known: BodyCache, sent: bytes, ignored: IgnoredFields) -> Any:
    request, messages = known.read(sent, "owner", LIMITS, ignored)
    return request, chat_request.spec(request, messages)


@given(st.integers(0, 2**32))
@examples(60)
def test_a_recognized_body_says_what_the_whole_one_says(seed: int) -> None:
    known = BodyCache()
    for sent in requests(Random(seed)):
        expected = outcome(lambda ignored, sent=sent: whole(sent, ignored))
        assert outcome(lambda ignored, sent=sent: recognized(known, sent, ignored)) == expected


def termed(known: TurnSpecCache, sent: bytes, ignored: IgnoredFields) -> Any:
    check_shape(sent, LIMITS)
    request = chat_request.READER.read(sent, ignored)
    return request, read_terms(request, known, LIMITS, ignored)


TERMS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": "ünd \ud800"},
    {"temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {"add_generation_prompt": True},
    {"continue_final_message": True},
    {"input_ids": [1], "response_prefix": "so"},
    {"input_ids": [1]},
    {"temperature": 7},
    {"min_tokens": 3, "max_tokens": 2},
    {"tools": [{"function": {"name": "f"}}], "tool_choice": "required"},
    {"chat_template_kwargs": {"tone": "kind"}, "reasoning_effort": "none"},
)


@given(st.integers(0, 2**32))
@examples(60)
def test_known_terms_say_what_the_whole_request_says(seed: int) -> None:
    random, known = Random(seed), TurnSpecCache(chat_request.ChatRequest, "messages")
    for _ in range(24):
        ends = random.choice(({}, {"prefix": True})) if random.random() < 0.5 else {}
        messages = [message(random), {"role": "assistant", "content": "so", **ends}]
        sent = body(random, messages[: random.choice((0, 1, 2, 2))], {}, random.choice(TERMS))
        expected = outcome(lambda ignored, sent=sent: whole(sent, ignored))
        assert outcome(lambda ignored, sent=sent: termed(known, sent, ignored)) == expected


def test_terms_of_lately_are_not_looked_at_again() -> None:
    known = TurnSpecCache(chat_request.ChatRequest, "messages")
    _, first = termed(known, grown(1), IgnoredFields())
    _, second = termed(known, grown(2), IgnoredFields())
    assert second.sampling is first.sampling
    assert len(second.prompts[0].messages) == 2


def grown(count: int) -> bytes:
    messages = [{"role": "user", "content": f"hello {number}"} for number in range(count)]
    return json.dumps({"model": "m", "messages": messages, "stream": True}).encode()


def test_what_was_read_before_is_not_read_again() -> None:
    known = BodyCache()
    first, _ = known.read(grown(5), "a", Limits(), IgnoredFields())
    second, _ = known.read(grown(7), "a", Limits(), IgnoredFields())
    assert first.messages and second.messages and len(second.messages) == 7
    assert all(one is other for one, other in zip(first.messages, second.messages[:5], strict=True))


def test_what_one_key_sent_is_not_known_for_another() -> None:
    known = BodyCache()
    first, _ = known.read(grown(5), "a", Limits(), IgnoredFields())
    second, _ = known.read(grown(7), "b", Limits(), IgnoredFields())
    assert first.messages and second.messages
    assert first.messages[0] is not second.messages[0]


def test_bodies_that_are_kept_are_bounded() -> None:
    known = BodyCache(most_bytes=3 * len(grown(5)))
    first, _ = known.read(grown(5), "a", Limits(), IgnoredFields())
    known.read(b" " + grown(5), "a", Limits(), IgnoredFields())
    second, _ = known.read(grown(7), "a", Limits(), IgnoredFields())
    assert first.messages and second.messages
    assert first.messages[0] is not second.messages[0]
