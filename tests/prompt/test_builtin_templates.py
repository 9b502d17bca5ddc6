"""Chat templates by name, and one for models that have none."""

from pathlib import Path

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.errors import SettingsError
from dragoman.prompt import PromptBuilder
from dragoman.prompt.builtin_templates import FRAMES, check_template, choose_template, guess_frame
from dragoman.types import Conversation, Message
from tests.prompt.support import SHARED, ByteTokenizer

NOTHING = ModelCard(name="m", max_model_len=99)
TALK = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Hello"),
    Message(role="user", content="Why?"),
)


def written(source: str | None, *messages: Message) -> str:
    tokenizer = ByteTokenizer(special=("<s>", "</s>"))
    return PromptBuilder(NOTHING, tokenizer, template=source).text(Conversation(messages=messages))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "gemma",
            "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "llama2",
            "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Why? [/INST]",
        ),
        ("mistral-v3", "[INST] Be brief.\n\nHi[/INST] Hello</s>[INST] Why?[/INST]"),
        ("vicuna", "Be brief.\n\nUSER: Hi\nASSISTANT: Hello</s>\nUSER: Why?\nASSISTANT:"),
        ("plain", "Be brief.\n\nUser: Hi\nAssistant: Hello\nUser: Why?\nAssistant:"),
    ],
)
def test_frames_are_written_as_their_families_are(name: str, text: str) -> None:
    assert written(FRAMES[name].source(bos=False), *TALK) == text


@pytest.mark.parametrize("name", FRAMES)
def test_no_message_is_lost_in_any_frame(name: str) -> None:
    """Neither where there are several system messages, or nothing else, nor what tools gave."""
    source = FRAMES[name].source(bos=True)
    late = (*TALK, Message(role="system", content="Now."), Message(role="user", content="So?"))
    text = written(source, *late, Message(role="tool", content="12", tool_call_id="a"))
    offsets = [text.find(value) for value in ("Be brief.", "Hi", "Hello", "Why?", "Now.", "So?", "12")]
    assert -1 not in offsets
    assert text.startswith("<s>")
    assert "Be brief." in written(source, TALK[0])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "chatml"),
        ("google-gemma-2-2b-it", "gemma"),
        ("microsoft-Phi-3.5-mini-instruct", "phi3"),
    ],
)
def test_frames_are_equal_to_what_makers_publish(family: str, name: str) -> None:
    file = SHARED / "templates" / f"{family}.jinja"
    if not file.exists():
        pytest.skip(f"no {file}")
    own, ours = file.read_text(), FRAMES[name].source(bos="bos_token" in file.read_text())
    talk = TALK[1:] if name == "gemma" else TALK
    assert written(ours, *talk) == written(own, *talk)


@pytest.mark.parametrize(
    ("special", "name"),
    [
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "chatml"),
        (("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "phi4"),
        (("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "llama3"),
        (("<bos>", "<start_of_turn>", "<end_of_turn>"), "gemma"),
        (("<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]"), "mistral-v7-tekken"),
        (("<s>", "[INST]", "[/INST]"), "mistral-v3"),
        (("<s>", "</s>"), "plain"),
    ],
)
def test_the_tokens_of_a_model_tell_which_frame_it_knows(special: tuple[str, ...], name: str) -> None:
    assert guess_frame(special) == name
    chosen = choose_template(None, NOTHING, ByteTokenizer(special=special))
    assert (name in chosen.how, chosen.guessed) == (True, True)


def test_a_template_is_a_file_a_name_or_a_text(tmp_path: Path) -> None:
    card = ModelCard(name="m", max_model_len=9, templates={"default": "own", "rag": "documents"})
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    named = {
        None: None,
        str(file): "mine",
        "rag": "documents",
        "{{ 1 }}": "{{ 1 }}",
        "chatml": FRAMES["chatml"].source(bos=ByteTokenizer().add_bos),
    }
    for name, source in named.items():
        assert choose_template(name, card, ByteTokenizer()).source == source


def test_a_name_that_is_none_fails_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"`chat_template`.*chatml.*gemma"):
        choose_template("chatlm", NOTHING, ByteTokenizer())


def test_the_documents_name_all_of_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    assert [name for name in FRAMES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", ["missing.jinja", "folder/missing"])
def test_a_file_that_is_not_there_is_found_before_anything_is_loaded(name: str) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        check_template(name)
