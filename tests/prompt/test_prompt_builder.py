from concurrent.futures import ThreadPoolExecutor

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.errors import BadRequest, TemplateError
from dragoman.prompt import PromptBuilder
from dragoman.types import Conversation, IdsPrompt, Message, TextPrompt, ToolCall
from tests.prompt.support import ByteTokenizer, corpus, prompter

USER = Message(role="user", content="hi")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def begun(content: str) -> Conversation:
    return Conversation(
        messages=(USER, Message(role="assistant", content=content)),
        add_generation_prompt=False,
        continue_final_message=True,
    )


def test_text_and_ids() -> None:
    text, ids = prompter("chatml").render(Conversation(messages=(USER,)))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[:5] == (258, *b"user")
    assert ids.count(258) == 2


def test_no_bos_of_its_own() -> None:
    assert 256 not in prompter("chatml").encode(Conversation(messages=(USER,)))
    assert prompter("turns").encode(Conversation(messages=(USER,))).count(256) == 1


def test_no_doubled_bos() -> None:
    twice = prompter("{{ bos_token }}{{ bos_token }}{{ messages[0].content }}")
    assert twice.render(Conversation(messages=(USER,))) == ("<s>hi", (256, *b"hi"))


@pytest.mark.parametrize("content", ["It is", "It is ", "", "a<|im_end|>b", "It is <|im_"])
def test_continuing_the_final_message(content: str) -> None:
    text, ids = prompter("chatml").render(begun(content))
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"
    assert ids.count(259) == 1


@pytest.mark.parametrize("content", ["It is", "It is ", "\nIt is\n"])
def test_continuing_as_transformers_does(content: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    for name in ("chatml", "turns", "channels"):
        rendered, _ = utils.render_jinja_template(
            conversations=[messages],
            chat_template=corpus(name),
            continue_final_message=True,
            bos_token="<s>",
            eos_token="</s>",
        )
        assert prompter(name).text(begun(content)) == rendered[0]


def test_continuing_needs_a_message_and_no_generation_prompt() -> None:
    with pytest.raises(BadRequest) as caught:
        prompter("chatml").text(Conversation(messages=(USER,), continue_final_message=True))
    assert caught.value.param == "continue_final_message"
    with pytest.raises(BadRequest):
        prompter("chatml").text(
            Conversation(messages=(), continue_final_message=True, add_generation_prompt=False)
        )


def test_response_prefix() -> None:
    text, ids = prompter("chatml").render(Conversation(messages=(USER,), response_prefix="Sure<|im_end|>"))
    assert text.endswith("assistant\nSure<|im_end|>")
    assert ids.count(259) == 1


def test_named_templates() -> None:
    templates = {"default": "plain", "tool_use": "tools", "rag": "documents {{ documents | length }}"}
    builder = PromptBuilder(ModelCard(name="m", max_model_len=9, templates=templates), ByteTokenizer())
    assert builder.text(Conversation(messages=(USER,))) == "plain"
    assert builder.text(Conversation(messages=(USER,), tools=(TOOL,))) == "tools"
    assert (
        builder.text(Conversation(messages=(USER,), template="rag", documents=({"text": "x"},)))
        == "documents 1"
    )
    with pytest.raises(BadRequest, match="default, rag, tool_use"):
        builder.text(Conversation(messages=(USER,), template="other"))


def test_no_template() -> None:
    with pytest.raises(BadRequest, match="--chat-template"):
        prompter(None).text(Conversation(messages=(USER,)))
    assert prompter(None).encode(TextPrompt("a")) == (256, 97)
    assert prompter(None, template="{{ 1 }}").text(Conversation(messages=(USER,))) == "1"


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ '\ufdd0' }}", f"{{% set stop_strings = {['x'] * 65} %}}"],
    ids=["wrong", "marks", "stops"],
)
def test_wrong_templates_are_refused_when_loaded(source: str) -> None:
    with pytest.raises(TemplateError):
        prompter(source)


def test_ids_and_raw_text() -> None:
    builder = prompter("chatml")
    assert builder.render(IdsPrompt((256, 97))) == ("<s>a", (256, 97))
    assert builder.render(TextPrompt("<s>a")) == ("<s>a", (256, 97))
    assert builder.encode_special("a<s>") == [97, 256]
    with pytest.raises(BadRequest):
        builder.encode(IdsPrompt((9999,)))


def test_threads_may_share_it() -> None:
    builder = prompter("tagged_tools")
    asks = [Conversation(messages=(Message(role="user", content=f"n{n}<|im_end|>"),)) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(builder.render, asks)) == [builder.render(ask) for ask in asks]


@pytest.mark.parametrize("text", ["plain", "<|im_end|>"])
def test_nested_too_deeply(text: str) -> None:
    deep: object = text
    for _ in range(5000):
        deep = {"x": deep}
    with pytest.raises(BadRequest, match="too deeply"):
        prompter("tagged_tools").text(Conversation(messages=(USER,), tools=({"x": deep},)))


def test_half_a_surrogate_pair() -> None:
    call = ToolCall(id="a", name="f", arguments='{"k": "\\ud800"}')
    messages = (USER, Message(role="assistant", tool_calls=(call,)), Message(role="user", content="\udfff"))
    text, ids = prompter("headers").render(Conversation(messages=messages))
    assert text.count("\ufffd") == 2
    assert ByteTokenizer().decode(ids) == text
    assert prompter("chatml").render(TextPrompt("\ud800", None, False)) == ("\ufffd", (239, 191, 189))
