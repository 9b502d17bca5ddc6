"""Large requests do not hold up the others. `python -m tests.torture stalls` measures all that there are."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.attacks.bodies import good
from tests.attacks.frame import Frame
from tests.torture.battery.table import forgotten

CHAT = "/v1/chat/completions"
MEMORY_MB = 64
"""What the allocator keeps of the largest for the next one."""
LOOSE_MS = 1000.0
"""Twenty times what is promised: a machine that runs tests has other things to do."""


def test_every_route_is_in_the_battery() -> None:
    assert forgotten() == set()


def _user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


LARGE: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "parts": (CHAT, lambda: _user([{"type": "text", "text": "a"}] * 100_000)),
    "an unknown name": (CHAT, lambda: {"a" * (8 << 20): 1}),
    "tokens with their texts": ("/tokenize", lambda: {"prompt": "a" * (2 << 20), "return_token_strs": True}),
    "hosted items": ("/v1/responses", lambda: {"input": [{"type": "web_search_call", "action": {}}] * 4000}),
    "a grammar that is one name": (CHAT, lambda: {"guided_grammar": "a" * 65536}),
    "a grammar that is one open text": (CHAT, lambda: {"guided_grammar": '"' + '\\"' * 32767}),
    "the name of a dialect": ("/parse/function_call", lambda: {"tool_call_parser": "a" * (4 << 20)}),
    "unknown references": (
        "/v1/responses/input_tokens",
        lambda: {"input": [{"type": "item_reference", "id": f"msg_{n}"} for n in range(4096)]},
    ),
}


@pytest.mark.parametrize("what", LARGE)
def test_the_loop_goes_on_beside_a_large_request(frame: Frame, what: str) -> None:
    route, more = LARGE[what]
    body = {**good(route), **more()}
    frame.server.state()
    frame.sent(route, body)
    assert frame.server.state().busy_max_ms < LOOSE_MS
