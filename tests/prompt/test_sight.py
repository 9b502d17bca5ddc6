"""Pictures and sounds in prompts."""

from dragoman.dialects.registry import get_dialect
from dragoman.engines.scripted import PLACE_ID, ScriptedEngine, say
from dragoman.media import Media, MediaSpan
from dragoman.prompt import Prompter
from dragoman.turns.plan import Planner
from dragoman.turns.spec import TurnSpec
from dragoman.types import Conversation, Message, Sampling


def picture(digest: str = "a" * 64, width: int = 64, height: int = 32) -> Media:
    return Media(kind="image", format="png", data=b"data", digest=digest, width=width, height=height)


def test_a_picture_stands_where_the_template_writes_it() -> None:
    engine = ScriptedEngine(say("hi"), modalities=("image",))
    prompter = Prompter(engine.card, engine.tokenizer, place=engine.place)
    planner = Planner(engine.card, engine.tokenizer, prompter, get_dialect("plain"))
    shown = picture()
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "media": shown.digest},
        {"type": "text", "text": "b"},
    ]
    asked = Conversation(messages=(Message(role="user", content=parts),), media={shown.digest: shown})
    (job,) = planner.plan(TurnSpec(model=None, prompts=(asked,), sampling=Sampling(max_tokens=4))).jobs
    start = job.prompt.index(PLACE_ID)
    assert job.media == (MediaSpan(shown, start, 2),)
    assert prompter.decode(job.prompt[:start]).endswith("user\na")
    assert prompter.decode(job.prompt[start + 2 :]).startswith("b<|im_end|>")
    assert "a<|vision_start|><|image_pad|><|vision_end|>b" in prompter.text(asked)
