import pytest

from dragoman.errors import BadRequest
from dragoman.prompt.encode import PromptEncoder
from dragoman.types import TextPrompt
from tests.prompt.support import ByteTokenizer

BOS, EOS = 256, 257


def test_raw_prompts_may_hold_control_tokens() -> None:
    assert PromptEncoder(ByteTokenizer()).encode_text(TextPrompt("a</s>b")) == [BOS, 97, EOS, 98]


@pytest.mark.parametrize("text", ["a", "<s>a", ""])
def test_one_bos(text: str) -> None:
    assert PromptEncoder(ByteTokenizer()).encode_text(TextPrompt(text)).count(BOS) == 1


def test_no_bos_where_none_is_wanted() -> None:
    assert PromptEncoder(ByteTokenizer(add_bos=False)).encode_text(TextPrompt("a")) == [97]
    assert PromptEncoder(ByteTokenizer()).encode_text(TextPrompt("a", None, False)) == [97]
    assert PromptEncoder(ByteTokenizer(special=())).encode_text(TextPrompt("a")) == [97]


def test_suffix() -> None:
    tokenizer = ByteTokenizer()
    with pytest.raises(BadRequest) as caught:
        PromptEncoder(tokenizer).encode_text(TextPrompt("a", "b"))
    assert caught.value.param == "suffix"
    tokenizer.infill = (260, 261, 262)
    assert PromptEncoder(tokenizer).encode_text(TextPrompt("a", "b")) == [BOS, 260, 97, 261, 98, 262]
    assert PromptEncoder(tokenizer).encode_text(TextPrompt("a", "")) == [BOS, 260, 97, 261, 262]


@pytest.mark.parametrize("id", [-1, 10_000])
def test_ids_are_checked(id: int) -> None:
    with pytest.raises(BadRequest):
        PromptEncoder(ByteTokenizer()).check_ids([1, id], "prompt")
