"""Hugging Face tokenizers as ours: exact bytes, and no control token from text."""

import json
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers, processors

from dragoman.engines.default_weights import default_model
from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer
from dragoman.engines.supervisor import StableTokenizer
from dragoman.errors import ModelFileError
from dragoman.prompt.encode import PromptEncoder
from tests.support import tokenizers as make

KINDS = {"byte-level": make.byte_level, "sentence-piece": make.sentence_piece, "unigram": make.unigram}
LOSSLESS = pytest.mark.parametrize("kind", KINDS)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*make.CONTROL, "<tool>", "é!", "the quick", " ", "\r\n", "12", "日本", "<|", "|>", "</"]
        ),
        st.text(st.characters(codec="utf-8"), max_size=6),
    ),
    max_size=12,
).map("".join)


@cache
def tokenizer(kind: str) -> tuple[Tokenizer, HfTokenizer]:
    result = (make.default_tokenizer if kind == "default" else KINDS[kind])()
    return result, HfTokenizer(result)


@cache
def llama() -> LlamaTokenizer:
    return LlamaTokenizer(LlamaModel(default_model()))


def joined(own: HfTokenizer, ids: list[int]) -> bytes:
    return b"".join(own.pieces[id_] for id_ in ids)


@LOSSLESS
@given(text=TEXTS)
def test_text_never_becomes_a_control_token(kind: str, text: str) -> None:
    own = tokenizer(kind)[1]
    assert not set(own.encode(text)) & set(own.special_ids.values())


@LOSSLESS
def test_a_text_among_several_has_the_ids_that_it_has_alone(kind: str) -> None:
    own = tokenizer(kind)[1]
    text = "the quick 日本 12 é! " * 512
    assert own.encode(text) == own._plain.encode(text, add_special_tokens=False).ids


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    own, text = tokenizer("byte-level")[1], "the quick brown fox " * 20_000
    encoding = threading.Thread(target=own.encode, args=[text])
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 3


@LOSSLESS
@given(text=TEXTS)
def test_the_pieces_of_a_text_are_its_bytes(kind: str, text: str) -> None:
    own = tokenizer(kind)[1]
    assert joined(own, own.encode(text)) == text.replace("▁", " ").encode()


@LOSSLESS
@given(data=st.data())
def test_pieces_agree_with_decode_where_decode_is_exact(kind: str, data: st.DataObject) -> None:
    theirs, own = tokenizer(kind)
    # Theirs maps the text of an added token back to bytes, although it was never mapped to them.
    usual = [id_ for id_, piece in enumerate(own.pieces) if piece != "é!".encode()]
    ids = data.draw(st.lists(st.sampled_from(usual), max_size=12))
    try:
        text = joined(own, ids).decode()
    except UnicodeDecodeError:
        return
    assert theirs.decode(ids, skip_special_tokens=False) == text


@given(text=TEXTS)
def test_the_default_model_has_the_ids_of_llama_cpp(text: str) -> None:
    assert tokenizer("default")[1].encode(text) == llama().encode(text)


def test_the_default_model_has_the_pieces_of_llama_cpp() -> None:
    own = tokenizer("default")[1]
    assert own.pieces == llama().pieces
    assert own.special_ids == llama().special_ids


def test_a_character_that_cannot_be_written_is_unknown() -> None:
    own = HfTokenizer(make.word_piece())
    assert own.encode("the 日") == [3, own.special_ids["[UNK]"]]
    assert own.encode("[CLS]") == [own.special_ids["[UNK]"]] * 3


def test_words_of_word_piece_begin_with_a_space() -> None:
    own = HfTokenizer(make.word_piece())
    assert joined(own, own.encode("The quickly quicker fox")) == b" the quickly quicker fox"


def test_ids_up_to_the_models_size_have_no_bytes() -> None:
    result = make.byte_level()
    own = HfTokenizer(result, size=512)
    assert len(own.pieces) == 512
    assert set(own.pieces[result.get_vocab_size() :]) == {b""}


def test_added_tokens_that_are_no_control_tokens_are_found_in_text() -> None:
    own = tokenizer("byte-level")[1]
    assert [own.pieces[id_] for id_ in own.encode("<tool>")] == [b"<tool>"]


@pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
def test_known_ends_of_turns_are_end_ids(text: str) -> None:
    result = make.byte_level()
    result.add_tokens([text])
    own = HfTokenizer(result)
    assert own.special_ids[text] in own.end_ids


def test_harmony_goes_on_after_the_end_of_a_message() -> None:
    result = make.byte_level()
    result.add_special_tokens(["<|end|>", "<|return|>", "<|call|>"])
    own = HfTokenizer(result)
    assert own.special_ids["<|end|>"] not in own.end_ids
    assert {own.special_ids["<|return|>"], own.special_ids["<|call|>"]} <= own.end_ids


def folder_of(tmp_path: Path, **files: object) -> Path:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return make.saved(make.byte_level(), tmp_path)


def test_a_folder_says_which_tokens_are_which(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "add_bos_token": True,
    }
    own = HfTokenizer(
        folder_of(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [5, 7]})
    )
    assert (own.bos_id, own.eos_id, own.add_bos) == (own.special_ids["<s>"], own.special_ids["</s>"], True)
    assert own.end_ids == {5, 7, own.special_ids["</s>"], own.special_ids["<|im_end|>"]}
    assert own.special_tokens == {"pad_token": "<unk>"}


def test_an_end_id_outside_of_the_vocabulary_is_none(tmp_path: Path) -> None:
    own = HfTokenizer(folder_of(tmp_path, generation_config={"eos_token_id": 1 << 30}))
    assert max(own.end_ids) < len(own.pieces)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"chat_template": "A"}, {"default": "A"}),
        ({"chat_template": [{"name": "tool_use", "template": "B"}]}, {"tool_use": "B"}),
        ({}, {}),
    ],
)
def test_templates_of_the_configuration(tmp_path: Path, config: object, expected: dict[str, str]) -> None:
    assert HfTokenizer(folder_of(tmp_path, tokenizer_config=config)).templates == expected


def test_a_template_file_is_newer_than_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    own = HfTokenizer(folder_of(tmp_path, tokenizer_config={"chat_template": "old"}))
    assert own.templates == {"default": "new", "rag": "with documents"}


def test_what_stands_around_a_text_is_known() -> None:
    result = make.word_piece()
    result.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    own = HfTokenizer(result)
    assert (own.before, own.after) == ((1,), (2,))
    assert (own.bos_id, own.add_bos) == (1, True)
    assert own.encode("the") == [3]


def test_models_that_fill_gaps_are_known_by_their_tokens() -> None:
    result = make.byte_level()
    result.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    own = HfTokenizer(result)
    assert own.infill is not None
    assert [own.pieces[id_] for id_ in own.infill] == [
        b"<|fim_prefix|>",
        b"<|fim_suffix|>",
        b"<|fim_middle|>",
    ]


def test_a_transformers_tokenizer_is_the_same_as_its_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make.byte_level(), bos_token="<s>", eos_token="</s>", chat_template="T"
    )
    theirs.save_pretrained(tmp_path)
    own, read = HfTokenizer(theirs), HfTokenizer(str(tmp_path))
    for name in ("pieces", "special_ids", "bos_id", "eos_id", "end_ids", "templates", "add_bos"):
        assert getattr(own, name) == getattr(read, name), name


def test_only_the_first_word_of_a_prompt_gets_a_space() -> None:
    result = make.unigram()
    result.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    own = HfTokenizer(result)
    text = "the<|im_start|>the fox"
    assert PromptEncoder(own).encode_special(text) == result.encode(text, add_special_tokens=False).ids
    assert (joined(own, own.encode("fox")), joined(own, own.encode_continuation("fox"))) == (b" fox", b"fox")


def test_an_engine_that_is_opened_again_writes_the_same_spaces() -> None:
    result = make.unigram()
    result.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    own, text = HfTokenizer(result), "the<|im_start|>the fox"
    assert PromptEncoder(StableTokenizer(own)).encode_special(text) == PromptEncoder(own).encode_special(text)


def test_the_tokenizer_that_was_given_is_left_as_it_was() -> None:
    result = make.unigram()
    before = result.to_str()
    HfTokenizer(result)
    assert result.to_str() == before


def test_a_card_has_what_the_tokenizer_knows(tmp_path: Path) -> None:
    config = {"chat_template": "T", "pad_token": "<unk>"}
    own = HfTokenizer(folder_of(tmp_path, tokenizer_config=config))
    card = card_of(own, name="m", max_model_len=64)
    assert (card.name, card.max_model_len, card.templates) == ("m", 64, {"default": "T"})
    assert card.special_tokens == {"pad_token": "<unk>"}


def spoil(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "tokenizer.json").write_text(text)


@pytest.mark.parametrize(
    ("ruin", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is needed"),
        (spoil("{"), "not valid JSON"),
        (spoil("[]"), "not hold a JSON object"),
        (spoil("{}"), "not a valid tokenizer definition"),
        (spoil('{"version": "1.0", "model": {"type": "Magic", "vocab": {}}}'), "cannot read this"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(
    tmp_path: Path, ruin: Callable[[Path], object], message: str
) -> None:
    folder = folder_of(tmp_path)
    ruin(folder)
    with pytest.raises(ModelFileError, match=message):
        HfTokenizer(folder)
