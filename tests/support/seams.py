"""Conversations of several turns with any chat template, and a model whose ids no encoder would choose."""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.dialects.declarations import starts_in_reasoning
from dragoman.dialects.parser import Parser
from dragoman.dialects.render import render
from dragoman.engines.protocol import ModelCard
from dragoman.media import Media, MediaKind
from dragoman.prompt import PromptBuilder
from dragoman.prompt.find import find_dialect
from dragoman.prompt.template import Clock
from dragoman.turns.plan import Planner, TurnCache, TurnPlan
from dragoman.turns.spec import History, ParseOptions, TurnSpec
from dragoman.types import Answer, Conversation, Message, Sampling, ToolCall, TurnRecord, fold
from tests.prompt.support import clock

Client: TypeAlias = Literal["has no reasoning", "sends it back", "drops it"]
CLIENTS: tuple[Client, ...] = ("has no reasoning", "sends it back", "drops it")
Writes: TypeAlias = Literal["as the template", "as the dialect"]
"""How the model writes: as the template does in the history, or as its dialect is rendered."""
WRITES: tuple[Writes, ...] = ("as the template", "as the dialect")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
_CONTROL = re.compile(
    r"<[|｜][^<>{}'\"\s]{1,40}[|｜]>|<[|][a-z_\"|]{3,20}>|<[a-z_]{3,20}[|]>|\[/?[A-Z][A-Z_]{2,20}\]"
    r"|</?[a-z_]{3,30}>|</?s>|\[e~\[|\]<\]\w+\[>\["
)
_ENDS = re.compile(
    r"<\|(im_end|eot_id|eom_id|end|return|call|END_OF_TURN_TOKEN|end_of_text|turn_end|endofturn|observation"
    r"|end_of_msg|eos|eot)\|>|<｜end▁of▁sentence｜>|<end_of_turn>|<turn\|>|</s>|\[e~\["
)
_CLOSED = re.compile(
    r"""(?:\s*(?:["\])}]|</[^>]+>|\]<\]\w+\[>\[</\w+>|<[|｜][^<>]*(?:end|suffix|"|calls)[^<>]*>|<tool_call\|>))*"""
)
"""What may follow the last word of a call and belongs to it."""
_EOS = "</s>"


def at_once(call: Callable[[], None]) -> None:
    """Tries a template now, where otherwise no request would wait for it."""
    call()


WORDS = (
    *("The", " weather", " in", " Paris", "Pa", "ris", "get", "_weather", "city", "Hm", ", I", " think"),
    *("Lon", "don", "So", "und"),
)


class Vocabulary:
    """Bytes, control tokens, and words that `encode` never gives: by these what was sampled is told."""

    add_bos = False
    infill: tuple[int, int, int] | None = None

    def __init__(self, source: str, ends: Sequence[str] = ()) -> None:
        """`ends` are tokens that end a turn, beside those that are named like it."""
        control = sorted({"<s>", _EOS, *ends, *(match.group() for match in _CONTROL.finditer(source))})
        self.special_ids: Mapping[str, int] = {text: 256 + number for number, text in enumerate(control)}
        self.pieces = [
            *(bytes([byte]) for byte in range(256)),
            *(text.encode() for text in (*control, *WORDS)),
        ]
        self.words = {word: 256 + len(control) + number for number, word in enumerate(WORDS)}
        self.bos_id: int | None = self.special_ids["<s>"]
        self.eos_id: int | None = self.special_ids[_EOS]
        named = [text for text in control if _ENDS.fullmatch(text) or text in ends]
        # Where answers have an end of their own, this one stands between their blocks.
        self.ends = tuple(text for text in named if text != "<|end|>" or "<|return|>" not in named)
        self.end_ids = frozenset(self.special_ids[end] for end in self.ends)
        known = sorted([*self.special_ids, *self.words], key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known)) + "|.", re.DOTALL)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def sample(self, text: str) -> tuple[int, ...]:
        """Ids of a text as a model might have sampled them."""
        ids = {**self.special_ids, **self.words}
        pieces = (match.group() for match in self._known.finditer(text))
        return tuple(id_ for piece in pieces for id_ in ([ids[piece]] if piece in ids else piece.encode()))


class Model:
    """One template, its planner, and a model that answers."""

    def __init__(
        self,
        source: str,
        ends: Sequence[str] = (),
        clock: Clock = clock,
        modalities: Iterable[MediaKind] = (),
    ) -> None:
        self.vocabulary = Vocabulary(source, ends)
        self.placed: list[str] = []
        """Pictures that were asked for, by their digests."""
        card = ModelCard(
            name="m", max_model_len=1 << 20, templates={"default": source}, modalities=frozenset(modalities)
        )
        dialect = find_dialect(
            template=source, special_tokens=list(self.vocabulary.special_ids), bos_token="<s>", eos_token=_EOS
        )
        self.dialect = dialect.dialect
        prompter = PromptBuilder(card, self.vocabulary, clock=clock, dialect=self.dialect, placer=self.place)
        self.planner = Planner(card, self.vocabulary, prompter, self.dialect)

    @classmethod
    def like(cls, other: "Model") -> "Model":
        """One that remembers nothing."""
        model = copy(other)
        model.planner = copy(other.planner)
        model.forget()
        return model

    def place(self, media: Media) -> list[int]:
        """Two ids for each picture, of words that `encode` never gives."""
        self.placed.append(media.digest)
        return [self.vocabulary.words["und"]] * 2

    def forget(self) -> None:
        self.planner.turn_cache = TurnCache("m", self.vocabulary.pieces)

    def plan(
        self,
        messages: Sequence[Message],
        history: History = "template",
        owner: str = "",
        truncate: int | None = None,
        **more: Any,
    ) -> TurnPlan:
        spec = TurnSpec(
            model=None,
            prompts=(Conversation(messages=tuple(messages), tools=(TOOL,), **more),),
            truncate_prompt=truncate,
            sampling=Sampling(max_tokens=8),
            parsing=ParseOptions(tools=(TOOL,)),
            history=history,
            owner=owner,
        )
        return self.planner.plan(spec)

    def text(self, messages: Sequence[Message], **more: Any) -> str:
        return self.planner.prompter.text(Conversation(messages=tuple(messages), tools=(TOOL,), **more))

    def decode(self, ids: Sequence[int]) -> str:
        return self.planner.prompter.decode(ids)

    def control(self, ids: Sequence[int]) -> list[str]:
        """The control tokens among them."""
        return [self.decode((id_,)) for id_ in ids if id_ in self.vocabulary.special_ids.values()]

    def spell(self, wrote: str, words: str) -> tuple[int, ...]:
        """As it is sampled, but for these words, which are spelled in letters."""
        before, text, after = wrote.partition(words)
        return (*self.vocabulary.sample(before), *text.encode(), *self.vocabulary.sample(after))

    def answer(self, plan: TurnPlan, wrote: str) -> tuple[int, ...]:
        """Has the model answer; what it sampled."""
        ids = self.vocabulary.sample(wrote)
        (job,), media = plan.jobs, plan.log_fields(0).get("media", ())
        self.planner.turn_cache.add(
            TurnRecord(prompt=job.prompt, ids=ids, media=media, prompt_key=plan.keys[0]())
        )
        return ids

    def writes(self, way: Writes, before: Sequence[Message], answer: Message) -> str:
        written = self._written(before, answer) if way == "as the template" else None
        return self._rendered(answer, self.text(before)) if written is None else written

    def _written(self, before: Sequence[Message], answer: Message) -> str | None:
        """What the template writes for an answer that another message follows, with the end of the turn."""
        prompt = self.text(before)
        one, other = (
            self.text([*before, answer, replace(following(answer), content=words)])
            for words in ("Xone", "Yother")
        )
        same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        if not one.startswith(prompt):
            return None
        wrote, last = one[len(prompt) : same], _last_word(answer)
        start = wrote.rfind(last) + len(last) if last in wrote else 0
        ends = [(offset, end) for end in self.vocabulary.ends if (offset := wrote.find(end, start)) >= 0]
        if ends:
            offset, end = min(ends)
            return wrote[: offset + len(end)]
        closed = _CLOSED.match(wrote, start) if answer.tool_calls else None
        return wrote[: closed.end() if closed else start]

    def _rendered(self, answer: Message, prompt: str) -> str:
        result = Answer(
            text=str(answer.content or ""), reasoning=answer.reasoning or "", calls=list(answer.tool_calls)
        )
        text, marks = render(self.dialect, result), self.dialect.reasoning
        if starts_in_reasoning(self.dialect, prompt) and marks:
            text = text.removeprefix(marks.open[0]) if answer.reasoning else marks.close[0] + text
        return text + self.vocabulary.ends[0]

    def told(self, wrote: str, prompt: str, answer: Message) -> Message:
        """What a client gets of an answer."""
        begun = starts_in_reasoning(self.dialect, prompt)
        parser = Parser(self.dialect, (TOOL,), begun, special_tokens=self.planner.prompter.controls)
        decoder, ids = getincrementaldecoder("utf-8")(), self.vocabulary.sample(wrote)
        pieces = [(id_, decoder.decode(self.vocabulary.pieces[id_])) for id_ in ids]
        read = fold([*parser.feed(pieces), *parser.finish()])
        calls = zip(read.calls, answer.tool_calls, strict=False)
        return Message(
            role="assistant",
            content=read.text or None,
            reasoning=read.reasoning or None,
            tool_calls=tuple(replace(call, id=old.id) for call, old in calls),
        )


def _last_word(answer: Message) -> str:
    if not answer.tool_calls:
        return str(answer.content)
    return "Paris" if "Paris" in answer.tool_calls[-1].arguments else "London"


def answers(client: Client, *, calls: bool = True) -> list[Message]:
    """Two calls and two texts."""
    thought = None if client == "has no reasoning" else "Hm, I think so"
    tool_calls = [
        ToolCall(id=f"a1b2c3d4{n}", name="get_weather", arguments=json.dumps({"city": city}))
        for n, city in enumerate(("Paris", "London"))
    ]
    texts = ("The weather in Paris is fine.", "Sound advice, I think")
    first = [Message(role="assistant", reasoning=thought, tool_calls=(call,)) for call in tool_calls]
    messages = [Message(role="assistant", content=text, reasoning=thought) for text in texts]
    return [*(first if calls else messages), *messages]


def following(answer: Message) -> Message:
    if answer.tool_calls:
        return Message(role="tool", content="12 °C", tool_call_id=answer.tool_calls[0].id, name="get_weather")
    return Message(role="user", content="And then?")


class Row(Struct):
    """One turn that had a turn before it."""

    goes_on: bool
    """Whether its prompt begins with the prompt and the ids before, but for the end of that turn."""
    whole: bool
    """The same with that end."""
    text_kept: bool
    """Whether its text does."""
    exact: bool
    """Whether the ids say what the template writes."""
    rest_fits: bool
    """Whether the template writes what follows the ids that were kept."""
    words_kept: bool
    """Whether the last words of a text, where they are written, have the ids that were sampled."""
    split: str


def held(model: Model, client: Client, writes: Writes, history: History = "template") -> Iterator[Row]:
    model.forget()
    messages = [Message(role="user", content="Weather in Paris?")]
    before: tuple[int, ...] = ()
    before_text, words = "", tuple[int, ...]()
    end: tuple[int, ...] = ()
    for number, answer in enumerate(answers(client, calls=model.dialect.has_calls)):
        plan, text = model.plan(messages, history), model.text(messages)
        prompt = plan.jobs[0].prompt
        if number:
            kept = before[: len(before) - len(end)]
            goes_on, whole = prompt[: len(kept)] == kept, prompt[: len(before)] == before
            yield Row(
                goes_on=goes_on,
                whole=whole,
                text_kept=text.startswith(before_text),
                exact=model.decode(prompt) == text,
                rest_fits=text.endswith(model.decode(prompt[len(before if whole else kept) :])),
                words_kept=_holds(prompt, words) or model.decode(words) not in text,
                split=plan.splits[0],
            )
        wrote = model.writes(writes, messages, answer)
        ids = model.answer(plan, wrote)
        end = ids[-1:] if ids[-1] in model.vocabulary.end_ids else ()
        numbers = ids[: len(ids) - len(end)]
        before, before_text = (*prompt, *ids), text + model.decode(numbers)
        words = numbers[-3:] if answer.content else ()
        message = model.told(model.decode(numbers), text, answer)
        messages += [
            replace(message, reasoning=None) if client == "drops it" else message,
            following(message),
        ]


def _holds(ids: Sequence[int], words: Sequence[int]) -> bool:
    return any(tuple(ids[at : at + len(words)]) == tuple(words) for at in range(len(ids)))
