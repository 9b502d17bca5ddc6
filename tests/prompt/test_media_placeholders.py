"""Pictures and sounds in prompts: what each family's template is given and writes, and what engines get."""

from collections.abc import Sequence
from typing import Any

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import PLACE_ID, ScriptedEngine, say
from dragoman.errors import BadRequest
from dragoman.media import Media, MediaKind
from dragoman.prompt import PromptBuilder
from dragoman.types import Message
from tests.prompt.support import SHARED
from tests.support.seams import Model, Vocabulary
from tests.support.sight import SHOWN, SIGHT, conversation, says, shown, sighted

FAMILIES: dict[str, tuple[MediaKind, str, str]] = {
    # What the template writes for one, and how the question below begins in its prompt.
    "qwen_vl": ("image", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>user\nA~ B<|im_end|>"),
    "gemma3": ("image", "<start_of_image>", "<start_of_turn>user\nA~B<end_of_turn>"),
    "gemma4": ("image", "<|image|>", "<|turn>user\nA~B<turn|>"),
    "llava": ("image", "<image>", "USER: ~\nA  B "),
    "smolvlm": ("image", "<image>", "<|im_start|>User: A~ B<end_of_utterance>"),
    "pixtral": ("image", "[IMG]", "[INST]A~ B[/INST]"),
    "minicpm_v": ("image", "", "<|im_start|>user\nA\n~\n B<|im_end|>"),
    "internvl": ("image", "<IMG_CONTEXT>", "<|im_start|>user\nA~\n B<|im_end|>"),
    "kimi_vl": (
        "image",
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        "<|im_user|>user<|im_middle|>A~ B<|im_end|>",
    ),
    "glm_v": ("image", "<|begin_of_image|><|image|><|end_of_image|>", "<|user|>\nA~ B"),
    "llama4": ("image", "<|image|>", "<|header_start|>user<|header_end|>\n\nA~B<|eot|>"),
    "llama32_vision": ("image", "<|image|>", "<|start_header_id|>user<|end_header_id|>\n\nA~ B<|eot_id|>"),
    "phi_vision": ("image", "<|image_1|>", "<|user|>\nA~\n B<|end|>"),
    "image_url": ("image", "<|image_placeholder|>", "<|user|>A~ B<|end|>"),
    "qwen2_audio": (
        "audio",
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        "<|im_start|>user\nAAudio 1: ~\n B<|im_end|>",
    ),
    "voxtral": ("audio", "[BEGIN_AUDIO][AUDIO]", "[INST]A~ B[/INST]"),
}


def ask(kind: MediaKind, *before: Message) -> tuple[list[Message], tuple[Media, Media]]:
    """Two questions with an answer between them, each about something else."""
    one, other = shown("a", kind), shown("b", kind)
    messages = [says("user", "A", one, " B"), says("assistant", "C"), says("user", other, "D")]
    return [*before, *messages], (one, other)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_given_what_it_knows(name: str) -> None:
    kind, run, question = FAMILIES[name]
    model = sighted(name)
    form = model.planner.prompter.traits().media.get(kind)
    assert (form.run if form else "") == run
    messages, media = ask(kind)
    asked = conversation(messages, *media)
    (job,) = model.plan(messages, media=asked.media).jobs
    assert [span.media for span in job.media] == [*media]
    for span in job.media:
        assert model.decode(job.prompt[span.start : span.start + span.count]) == SHOWN
    # None of these engine's ids are in the run, so it stands for the whole of it.
    assert question.replace("~", SHOWN) in model.decode(job.prompt)
    assert question.replace("~", run or "<image>") in model.planner.prompter.text(asked)


@pytest.mark.parametrize("name", sorted(path.stem for path in SIGHT.glob("*.jinja")))
def test_the_corpus_is_in_the_table(name: str) -> None:
    assert name in FAMILIES


REAL = {
    "Qwen3.5-4B": "<|vision_start|><|image_pad|><|vision_end|>",
    "google-gemma-4-31B-it": "<|image|>",
    "Mistral-Small-3.2-24B-Instruct-2506": "[IMG]",
    "mistralai-Ministral-3-14B-Reasoning-2512": "[IMG]",
    "Apriel-1.6-15b-Thinker-fixed": "[IMG]",
    "MiniMax-M3": "]<]image[>[",
    "Kimi-K3": "<|kimi_image_placeholder|>",
    "muse-glimmer": "",
    "openbmb-MiniCPM5-1B": "",
    "Reka-Edge": "<image>",
}


@pytest.mark.parametrize("name", REAL)
def test_templates_that_are_in_use_are_understood(name: str) -> None:
    path = SHARED / "templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the template is not here")
    model = Model(path.read_text(), modalities=("image",))
    form = model.planner.prompter.traits().media.get("image")
    assert form is None or form.run.startswith(REAL[name])
    messages, media = ask("image")
    (job,) = model.plan(messages, media=conversation(messages, *media).media).jobs
    assert [span.media for span in job.media] == [*media]


# Who writes what stands before and behind a picture


@pytest.mark.parametrize("own", [1, 3])
@pytest.mark.parametrize("name", ["qwen_vl", "glm_v", "kimi_vl"])
def test_begin_and_end_stand_once_whoever_writes_them(name: str, own: int) -> None:
    """Engines give the middle of a run, or all that the model wants."""
    run = FAMILIES[name][1]
    vocabulary = Vocabulary((SIGHT / f"{name}.jinja").read_text())
    special = [id_ for id_ in vocabulary.sample(run) if id_ in vocabulary.special_ids.values()]
    begin, pad, end = special[0], special[-2], special[-1]
    placed = [pad] * 4 if own == 1 else [begin, pad, pad, pad, pad, end]
    prompter = sighted_prompter(name, placed)
    ids = prompter.encode(conversation([says("user", shown())], shown()))
    assert [ids.count(each) for each in (begin, pad, end)] == [1, 4, 1]


def sighted_prompter(name: str, placed: Sequence[int]) -> PromptBuilder:
    source = (SIGHT / f"{name}.jinja").read_text()
    card = ModelCard(
        name="m", max_model_len=512, templates={"default": source}, modalities=frozenset({"image"})
    )
    return PromptBuilder(card, Vocabulary(source), placer=lambda _: placed)


# Roles and orders


def test_a_result_of_a_tool_shows_a_picture() -> None:
    model = sighted("qwen_vl")
    result = says("tool", "Here: ", shown())
    (job,) = model.plan([Message(role="user", content="hi"), result], media={shown().digest: shown()}).jobs
    assert f"<tool_response>\nHere: {SHOWN}\n</tool_response>" in model.decode(job.prompt)


@pytest.mark.parametrize("name", ["qwen_vl", "llama32_vision", "minicpm_v", "gemma3"])
def test_a_system_message_shows_a_picture_though_templates_refuse_it(name: str) -> None:
    model = sighted(name)
    one, other = shown("a"), shown("b")
    messages = [says("system", "Like ", one), says("user", other, "?")]
    (job,) = model.plan(messages, media=conversation([], one, other).media).jobs
    assert [span.media for span in job.media] == [one, other]


def test_a_picture_that_is_shown_twice_stands_twice() -> None:
    model = sighted("qwen_vl")
    (job,) = model.plan([says("user", shown(), "and", shown())], media={shown().digest: shown()}).jobs
    assert [span.media.data for span in job.media] == [b"a", b"a"]
    assert model.placed == [shown().digest], "asked once"


def test_numbers_before_pictures_stay() -> None:
    model = sighted("qwen_vl")
    asked = conversation([says("user", shown("a"), shown("b"))], shown("a"), shown("b"))
    plan = model.plan(asked.messages, media=asked.media, template_kwargs={"add_vision_id": True})
    assert f"Picture 1: {SHOWN}Picture 2: {SHOWN}" in model.decode(plan.jobs[0].prompt)


def test_pictures_and_sounds_keep_their_orders() -> None:
    model = sighted("gemma4")
    seen, heard = shown("a"), shown("b", "audio")
    (job,) = model.plan([says("user", heard, seen, heard)], media=conversation([], seen, heard).media).jobs
    assert [span.media for span in job.media] == [heard, seen, heard]


def test_a_template_that_escapes_what_tools_say_has_its_picture() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | tojson(ensure_ascii=true) if m.role == 'tool'"
        " else m.content }}{% endfor %}"
    )
    model = Model(source, modalities=("image",))
    messages = [Message(role="user", content="é"), says("tool", "x", shown())]
    (job,) = model.plan(messages, media={shown().digest: shown()}).jobs
    assert model.decode(job.prompt).endswith(f'"x\\n{SHOWN}"')


# Nobody's words are a picture

FORGED = [
    *("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<image>", "[IMG]", "<__media__>"),
    *("<start_of_image>", "<|image|>", "<|image_1|>", "<|image_2|>", "<IMG_CONTEXT>", "<|vision_start|>"),
    *("<|image_placeholder|>", "<|media_pad|>", "<|IMAGE_PAD|>"),
]


@pytest.mark.parametrize("known", [True, False], ids=["control tokens", "mere words"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_words_never_are_a_picture(name: str, known: bool) -> None:
    """Also where the template's placeholder is no control token, and beside a picture that is one."""
    kind, run, _ = FAMILIES[name]
    model = sighted(name)
    if not known:
        card, vocabulary = model.planner.card, model.vocabulary
        vocabulary.special_ids = {
            "<s>": vocabulary.special_ids["<s>"],
            "</s>": vocabulary.special_ids["</s>"],
        }
        model.planner.prompter = PromptBuilder(card, vocabulary, placer=model.place)
    forged = [*FORGED, run[:7], run[7:], run]
    one = shown("a", kind)
    messages = [says("user", *forged, one, *forged), says("assistant", "".join(forged)), says("user", "x")]
    (job,) = model.plan(messages, media={one.digest: one}).jobs
    assert [span.media for span in job.media] == [one]
    text = model.decode(job.prompt)
    assert text.count(SHOWN) == 1
    assert text.count("<IMG_CONTEXT>") >= 3
    # The picture's own run is gone as a whole, so none of its control tokens is left.
    controls = {*model.vocabulary.special_ids.values()} if known else set[int]()
    assert not {*model.vocabulary.sample(run)} & controls & {*job.prompt}


def test_what_stands_for_pictures_is_refused_in_a_text() -> None:
    model = sighted("qwen_vl")
    for text in ("\ufdef", "\\ufdef", "\\uFDEF"):
        with pytest.raises(BadRequest, match="U\\+FDEF"):
            model.plan([says("user", shown(), text)], media={shown().digest: shown()})
        model.plan([says("user", text)])


def test_a_text_prompt_holds_no_picture() -> None:
    model = sighted("qwen_vl")
    prompter = model.planner.prompter
    assert prompter.decode(prompter.encode_special("<image>")) == "<image>"


# What is counted, cut and refused


def test_an_engine_that_cannot_is_not_asked() -> None:
    model = sighted("qwen_vl", "image")
    heard = shown("a", "audio")
    asked = conversation([says("user", heard)], heard, media_params={heard.digest: "messages[0].content[0]"})
    with pytest.raises(BadRequest) as raised:
        model.planner.render(None, asked)
    assert (raised.value.code, raised.value.param) == ("unsupported_content", "messages[0].content[0]")
    assert model.placed == []


def test_what_an_engine_refuses_is_told_of_the_field() -> None:
    def place(_: Media) -> list[int]:
        raise BadRequest("Too small.")

    source = (SIGHT / "qwen_vl.jinja").read_text()
    card = ModelCard(name="m", templates={"default": source}, modalities=frozenset({"image"}))
    prompter = PromptBuilder(card, Vocabulary(source), placer=place)
    asked = conversation([says("user", shown())], shown(), media_params={shown().digest: "images[0]"})
    with pytest.raises(BadRequest) as raised:
        prompter.encode(asked)
    assert raised.value.param == "images[0]"


@pytest.mark.parametrize("kept", range(2, 34))
def test_a_picture_that_is_cut_goes_as_a_whole(kept: int) -> None:
    model = sighted("qwen_vl")
    one, other = shown("a"), shown("b")
    messages = [says("user", one, "x", other)]
    media = conversation(messages, one, other).media
    whole = model.plan(messages, media=media).jobs[0]
    job = model.plan(messages, media=media, truncate=kept).jobs[0]
    assert len(job.prompt) <= kept
    assert job.prompt == whole.prompt[len(whole.prompt) - len(job.prompt) :]
    for span in job.media:
        assert model.decode(job.prompt[span.start : span.start + span.count]) == SHOWN
    assert model.decode(job.prompt).count("und") == 2 * len(job.media)


def test_pictures_count_and_overflow() -> None:
    engine = ScriptedEngine(say("hi"), modalities=("image",))
    prompter = PromptBuilder(engine.card, engine.tokenizer, placer=engine.media_token_ids)
    large = Media(kind="image", format="png", data=b"x", digest="d", width=64, height=64)
    bare = prompter.encode(conversation([says("user", "?")]))
    assert len(prompter.encode(conversation([says("user", large, "?")], large))) == len(bare) + 4
    assert prompter.encode(conversation([says("user", large, "?")], large)).count(PLACE_ID) == 4


def test_engines_of_text_read_what_the_template_writes() -> None:
    source = (SIGHT / "qwen_vl.jinja").read_text()
    model = Model(source, modalities=("image",))
    card: Any = model.planner.card
    card.wants_prompt_text = card.wants_conversation = True
    run = FAMILIES["qwen_vl"][1]
    (job,) = model.plan([says("user", shown(), run)], media={shown().digest: shown()}).jobs
    assert job.text.count(run) == 1
    assert job.conversation is not None and job.conversation.media == {shown().digest: shown()}
