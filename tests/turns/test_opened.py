from typing import Any

import pytest

from dragoman.dialects.declarations import Dialect, ReasoningSyntax
from dragoman.engines.scripted import ByteTokenizer
from dragoman.prompt.encode import PromptEncoder
from dragoman.turns.spec import ids_opened_reasoning, opened_reasoning
from dragoman.types import Conversation, Message

THINKS = Dialect(name="thinks", models="", reasoning=ReasoningSyntax())
USER = Message(role="user", content="What is <think>?")
TURN = "<|user|>What is <think>?<|assistant|>"


def opened(prompt: str, begun: str = "", dialect: Dialect = THINKS, **fields: Any) -> bool:
    conversation = Conversation(messages=(USER,), response_prefix=begun, **fields)
    return opened_reasoning(dialect, conversation, prompt + begun)


@pytest.mark.parametrize(
    ("end", "inside"),
    [
        ("", False),
        ("<think>", True),
        ("<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("</think>", False),
        ("<think>\nOkay,", True),
        ("<think>\n" + "so " * 85, True),
        ("<think>\n" + "so " * 87, False),
        ("<think>\nOkay,</think>Yes:", False),
        ("Well, what is <think>?", False),
        ("<think>\nOkay<|end|>\n<|assistant|>", False),
        ("<think>\nOkay\nAssistant:", False),
    ],
)
def test_the_last_words_of_the_prompt_decide(end: str, inside: bool) -> None:
    assert opened(TURN + end) is inside


@pytest.mark.parametrize(
    ("end", "begun", "inside"),
    [
        ("", "<think>\nHm", True),
        ("", "<think>Hm</think>Yes", False),
        ("<think>\n", "Hm", True),
        ("<think>\n", "Hm\n</think>\n\n", False),
        ("<think></think>", "Yes", False),
        ("", "Yes", False),
    ],
)
def test_what_the_client_began_decides_first(end: str, begun: str, inside: bool) -> None:
    assert opened(TURN + end, begun) is inside


@pytest.mark.parametrize("content", ["<think>Hm", [{"type": "text", "text": "<think>Hm"}]])
def test_a_message_that_is_continued_counts_as_begun(content: Any) -> None:
    messages = (USER, Message(role="assistant", content=content))
    conversation = Conversation(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert opened_reasoning(THINKS, conversation, TURN + "<think>Hm")


def test_a_dialect_without_reasoning_opens_none() -> None:
    assert not opened(TURN + "<think>", dialect=Dialect(name="plain", models=""))


class MarkedTokenizer(ByteTokenizer):
    """Reasoning has control tokens of its own, beside those of turns."""

    def __init__(self) -> None:
        super().__init__()
        self.special_ids = {**self.special_ids, "<think>": len(self.pieces), "</think>": len(self.pieces) + 1}
        self.pieces += [b"<think>", b"</think>"]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), MarkedTokenizer()])
@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nHm, so", True),
        ("<|im_start|>assistant\n<think>\nHm</think>Yes", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("no turns at all, but a <think> in the middle", False),
        ("no turns at all, and at the end <think>", True),
    ],
)
def test_ids_are_read_from_where_the_last_turn_begins(
    tokenizer: ByteTokenizer, prompt: str, inside: bool
) -> None:
    ids = PromptEncoder(tokenizer).encode_special(prompt)
    assert ids_opened_reasoning(THINKS, ids, tokenizer) is inside


def test_ids_in_a_dialect_without_reasoning_open_none() -> None:
    plain = Dialect(name="plain", models="")
    assert not ids_opened_reasoning(plain, list(b"<think>"), ByteTokenizer())
