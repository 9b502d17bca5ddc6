"""What people ask: a few questions, so that several people ask the same and its answer is known."""

from collections.abc import Sequence
from random import Random

from msgspec import Struct

from tests.soak.question import ABILITIES, PATHS, Api, Question

TOPICS = (
    "What is the capital of France?",
    "Name three colours.",
    "How do I boil an egg?",
    "Write a line about winter.",
    "What is seven times eight?",
    "Who wrote Hamlet?",
    "What is the weather in Paris?",
    "Invent a person.",
    "Translate 'good morning' into Spanish: ¿cómo se dice?",
    "Explain rain to a child.",
    "def add(a, b):",
    "日本の首都は?",
)
STOPS = ("the", ".", "\n")
SIZES = (2000, 4000, 6000)
"""Words of a document, each of which is one token."""
_WORDS = (
    "river",
    "stone",
    "lantern",
    "winter",
    "boat",
    "letter",
    "red",
    "question",
    "because",
    "under",
    "opens",
)


class KnownQuestion(Struct, frozen=True):
    """A question whose answer is collected at first, from a quiet server."""

    api: Api
    question: Question


def write_document(words: int, name: str = "") -> str:
    """The same text for the same name; another name gives another text from its first word on."""
    chance = Random(f"{words} {name}")
    return f"{name} " + " ".join(chance.choices(_WORDS, k=words)) + "\n\nWhat was this about?"


def ask(text: str, **how: object) -> Question:
    return Question((("user", text),), **how)  # type: ignore[arg-type]


def list_known() -> Sequence[KnownQuestion]:
    """Two questions for each API, one for each of its abilities, and a long prompt."""
    known: list[KnownQuestion] = []
    for number, api in enumerate(PATHS):
        known.append(KnownQuestion(api, ask(TOPICS[number], temperature=0.0)))
        known.append(KnownQuestion(api, ask(TOPICS[number + 6], temperature=0.8, seed=number)))
        fit = ABILITIES[api]
        if "schema" in fit:
            known.append(KnownQuestion(api, ask(TOPICS[7], temperature=0.0, schema=True, max_tokens=48)))
        if "required" in fit:
            how = ask(TOPICS[6], temperature=0.0, tools="required", max_tokens=64)
            known.append(KnownQuestion(api, how))
        if "count" in fit:
            known.append(KnownQuestion(api, ask(TOPICS[3], seed=5, temperature=1.0, count=2, stop=STOPS)))
    return [*known, KnownQuestion("chat", ask(write_document(SIZES[0]), temperature=0.0))]


KNOWN = list_known()
JOKE = ask("Tell me a joke.", max_tokens=20)
"""Asked again and again as it is, with no seed."""
