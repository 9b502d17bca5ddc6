"""Bodies that are JSON, or almost, and no request: refused on every route, before anything is made."""

import json
from typing import Any

import pytest

from tests.attacks.bodies import GOOD, WITH_BODY, good
from tests.attacks.frame import Frame

DEEP = 100_000
VALUES: dict[str, str] = {
    "not a number": "NaN",
    "infinity": "-Infinity",
    "a number without end": "1" * 5000,
    "a fraction without end": "0." + "1" * 5000,
    "more than 64 bits": str(2**64),
    "brackets": "[" * DEEP,
    "closed brackets": "[" * DEEP + "]" * DEEP,
    "braces": '{"a":' * DEEP + "1" + "}" * DEEP,
    "a little too deep": "[" * 200 + "]" * 200,
    "half a pair": '"\\ud800"',
    "the other half": '"\\udc00"',
    "pairs the wrong way": '"\\udc00\\ud800"',
    "not UTF-8": '"\udcff"',
    "a raw control character": '"\x01"',
    "half a string": '"abc',
    "an unknown escape": '"\\x41"',
    "a comment": "/* */ 1",
    "a comma too many": "[1,]",
    "a name twice": '{"a": 1, "a": 2}',
    "the last of many names twice": "{" + "".join(f'"{n}":0,' for n in range(100_000)) + '"99999":0}',
    "many values": "[" + "0," * 1_100_000 + "0]",
    "many objects": "[" + "{}," * 1_100_000 + "{}]",
    "many strings": "[" + '"a",' * 1_100_000 + '"a"]',
}
CODES = {"invalid_json", "limit_exceeded", "invalid_value"}


def with_value(route: str, raw: str) -> bytes:
    """The good body with a piece of JSON as the first of its values."""
    name, value = next(iter(GOOD[route].items()))
    rest = json.dumps({**good(route), name: "@"})
    param = "[@]" if isinstance(value, list) else "@"
    return rest.replace('"@"', param.replace("@", raw), 1).encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("name", VALUES)
def test_no_route_takes_such_a_value(frame: Frame, name: str) -> None:
    for route in WITH_BODY:
        error = frame.refused(route, with_value(route, VALUES[name]), status=(400,))
        assert error["code"] in CODES, (route, error)


BODIES: dict[str, Any] = {
    "nothing": b"\x00",
    "a null": b"null",
    "a list": b"[]",
    "a text": b'"abc"',
    "a number": b"7",
    "half an object": b'{"a":',
    "two objects": b"{}{}",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": "{}".encode("utf-16"),
    "brackets": b"[" * DEEP,
    "no JSON": b"<xml/>",
}


@pytest.mark.parametrize("name", BODIES)
def test_no_route_takes_such_a_body(frame: Frame, name: str) -> None:
    for route in WITH_BODY:
        if (route, name) != ("/lora-adapters", "a list"):
            frame.refused(route, BODIES[name], status=(400,))


@pytest.mark.parametrize("route", WITH_BODY)
def test_a_field_that_comes_twice_is_refused(frame: Frame, route: str) -> None:
    """Whoever looked at the request before us may have read the other one."""
    name = next(iter(GOOD[route]))
    once = json.dumps(good(route))[1:]
    error = frame.refused(route, f'{{"{name}": null, {once}'.encode(), status=(400,))
    assert (error["code"], name in error["message"]) == ("invalid_json", True)


def test_strings_may_have_what_the_rest_of_json_may_not(frame: Frame) -> None:
    text = "[" * 200 + "{" * 200 + "1" * 5000 + '\\"' * 99 + '"]}' + ',"a":1' * 9
    reply = frame.sent("/tokenize", {"prompt": text})
    assert bytes(json.loads(reply.body)["tokens"]).decode() == text
