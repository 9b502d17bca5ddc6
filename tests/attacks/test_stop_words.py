"""Stop strings that end an answer at its first token, or within two, beside all that is told of tokens."""

import json
from itertools import product
from typing import Any

import pytest

from tests.attacks.frame import Frame

ANSWER = "abcdef"
STOPS: dict[str, tuple[str | list[str], str]] = {
    "at the first token": ("a", ""),
    "at the second": ("b", "a"),
    "over two": ("bc", "a"),
    "at the last": ("f", "abcde"),
    "nowhere": ("x", ANSWER),
    "several": (["f", "ab"], ""),
}
"""Each with what is left of the answer."""


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_every_stop_with_all_that_is_told_of_tokens(frame: Frame, name: str, logprobs: int | None) -> None:
    stop, left = STOPS[name]
    fields: dict[str, Any] = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    for n, kept in product((1, 3), (False, True)):
        more = {"n": n, "stop": stop, "max_tokens": 20, "return_token_ids": kept}
        chat = frame.sent(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": ANSWER}], **fields, **more}
        )
        completion = frame.sent("/v1/completions", {"prompt": ANSWER, "logprobs": logprobs, **more})
        assert (chat.status, completion.status) == (200, 200)
        texts = [choice["message"]["content"] or "" for choice in json.loads(chat.body)["choices"]]
        texts += [choice["text"] for choice in json.loads(completion.body)["choices"]]
        assert texts == [left] * (2 * n)
