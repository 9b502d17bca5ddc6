"""People: each is a small state machine that does what people do, in the order in which they do it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

from msgspec.structs import replace

from tests.soak.answer import Answer
from tests.soak.client import Client
from tests.soak.connection import Departure
from tests.soak.question import ABILITIES, Ability, Api, Question
from tests.soak.topics import JOKE, KNOWN, SIZES, STOPS, TOPICS, ask, write_document

MOST_MESSAGES = 9
"""A conversation with more messages is ended, and a new one begun."""
SEEDS = range(4)
TEMPERATURES = (0.0, 0.7, 1.0, None)
OVERTIME_S = 15.0
"""Seconds that a person with a long prompt waits for it after the end of the phase."""

TEMPERAMENTS: Mapping[str, Mapping[str, int]] = {
    "steady": {"ask what is known": 1},
    "repeating": {"ask the same without a seed": 1},
    "leaving": {"leave at once": 1, "leave during the prompt": 4, "leave during the answer": 1},
    "impatient": {
        "ask": 3,
        "regenerate": 2,
        "ask again": 2,
        "ask what is known": 1,
        "leave at once": 3,
        "leave during the prompt": 6,
        "leave during the answer": 5,
    },
    "curious": {
        "ask": 8,
        "ask again": 4,
        "regenerate": 4,
        "edit": 4,
        "change the sampling": 3,
        "use tools": 3,
        "require a tool": 3,
        "use a schema": 4,
        "ask for two answers": 3,
        "ask with stop strings": 3,
        "continue what is stored": 3,
        "read a document": 1,
        "ask the same without a seed": 3,
        "ask what is known": 3,
        "leave at once": 1,
        "leave during the prompt": 1,
        "leave during the answer": 3,
    },
}
"""The weights of actions, for each temperament."""

PAUSES = {"repeating": (0.05, 0.2), "impatient": (0.0, 0.1)}
"""Seconds between two actions; other temperaments pause for up to 0.3 s."""


class Person:
    def __init__(self, name: str, temperament: str, client: Client, chance: Random) -> None:
        self._name = f"{name}, {temperament}"
        self._temperament = temperament
        self._weights = TEMPERAMENTS[temperament]
        self._client = client
        self._chance = chance
        self._until = 0.0
        self._kind = ""
        self._acts: dict[str, Callable[[], Awaitable[Any]]] = {
            "ask": self._ask_next,
            "ask again": self._ask_again,
            "regenerate": self._regenerate,
            "edit": self._edit,
            "change the sampling": self._change_sampling,
            "use tools": lambda: self._ask_with("tools", tools="auto", max_tokens=24),
            "require a tool": lambda: self._ask_with("required", tools="required", max_tokens=64),
            "use a schema": lambda: self._ask_with("schema", schema=True, max_tokens=48),
            "ask for two answers": lambda: self._ask_with("count", count=2),
            "ask with stop strings": lambda: self._ask_with("stop", stop=STOPS),
            "continue what is stored": self._continue_stored,
            "read a document": self._read_document,
            "ask the same without a seed": lambda: self._send(JOKE),
            "ask what is known": self._ask_known,
            "leave at once": lambda: self._leave(self._draw_question(), Departure(seconds=0)),
            "leave during the prompt": self._leave_document,
            "leave during the answer": self._leave_answer,
        }
        self._begin()

    async def live(self, until: float) -> None:
        self._until = until
        while time.monotonic() < until and not self._client.ledger.over.is_set():
            [self._kind] = self._chance.choices(list(self._weights), list(self._weights.values()))
            await self._acts[self._kind]()
            await asyncio.sleep(min(self._draw_pause(), max(until - time.monotonic(), 0)))

    def _draw_pause(self) -> float:
        """Mostly short; one in thirty takes seconds."""
        if self._chance.random() < 0.03:
            return self._chance.uniform(1, 3)
        least, most = PAUSES.get(self._temperament, (0.0, 0.3))
        return self._chance.choice((least, self._chance.uniform(least, most)))

    def _begin(self, ability: Ability | None = None) -> None:
        """Begin a new conversation, with an API that has the ability."""
        able = [api for api, abilities in ABILITIES.items() if ability is None or ability in abilities]
        self._api: Api = self._chance.choice(able)
        self._history: tuple[tuple[str, str], ...] = ()
        self._answer: Answer | None = None
        self._temperature = self._chance.choice(TEMPERATURES)
        self._seed = self._chance.choice((None, *SEEDS))
        self._question = self._draw_question()

    def _need(self, ability: Ability) -> None:
        if ability not in ABILITIES[self._api] or len(self._history) > MOST_MESSAGES:
            self._begin(ability)

    def _draw_question(self) -> Question:
        """The next question of this conversation."""
        items = self._history if "history" in ABILITIES[self._api] else ()
        messages = (*items, ("user", self._chance.choice(TOPICS)))
        tokens = self._chance.choice((8, 16, 32))
        return Question(messages, max_tokens=tokens, temperature=self._temperature, seed=self._seed)

    async def _send(
        self, question: Question, departure: Departure | None = None, api: Api | None = None
    ) -> Answer | None:
        return await self._client.ask(
            self._name,
            api or self._api,
            question,
            stream=self._chance.random() < 0.6,
            kind=self._kind,
            departure=departure,
        )

    async def _converse(self, question: Question) -> None:
        """Ask, and keep the question and its answer as the conversation."""
        self._question = question
        if answer := await self._send(question):
            self._answer = answer
            self._history = (*question.messages, ("assistant", answer.text or "-"))

    async def _ask_next(self) -> None:
        if len(self._history) > MOST_MESSAGES or self._chance.random() < 0.15:
            self._begin()
        await self._converse(self._draw_question())

    async def _ask_again(self) -> None:
        await self._converse(self._question)

    async def _regenerate(self) -> None:
        """Ask the last question again with other sampling."""
        await self._converse(
            replace(self._question, seed=self._chance.choice((None, *SEEDS)), temperature=0.9)
        )

    async def _edit(self) -> None:
        """Replace an earlier message, and drop all that came after it."""
        self._need("history")
        indices = [offset for offset, (role, _) in enumerate(self._history) if role == "user"]
        self._history = self._history[: self._chance.choice(indices or [0])]
        await self._converse(self._draw_question())

    async def _change_sampling(self) -> None:
        self._temperature = self._chance.choice(TEMPERATURES)
        self._seed = self._chance.choice((None, *SEEDS))
        await self._converse(replace(self._question, temperature=self._temperature, seed=self._seed))

    async def _ask_with(self, ability: Ability, **how: Any) -> None:
        """Ask with a tool, a schema and so on; the conversation stays without its answer."""
        self._need(ability)
        await self._send(replace(self._draw_question(), **how))

    async def _continue_stored(self) -> None:
        self._need("continue")
        previous = self._answer.handle if self._answer else None
        new = replace(ask(self._chance.choice(TOPICS)), previous=previous, temperature=self._temperature)
        if answer := await self._send(new):
            self._answer = answer
            # A context of ids grows with each answer.
            if self._chance.random() < 0.3:
                self._begin("continue")

    async def _ask_known(self) -> None:
        known = self._chance.choice(KNOWN)
        await self._send(known.question, api=known.api)

    async def _read_document(self) -> None:
        """Wait for a long prompt; only one person does so at a time."""
        if self._client.reading.locked():
            return
        async with self._client.reading:
            text = write_document(self._chance.choice(SIZES))
            stays_s = max(self._until - time.monotonic(), 0) + OVERTIME_S
            await self._send(ask(text, temperature=0.0, max_tokens=8), Departure(seconds=stays_s), "chat")

    async def _leave_document(self) -> None:
        """Leave a long prompt that no other request shares, so that none of it is in the prefix cache."""
        text = write_document(self._chance.choice((50, 300, *SIZES)), str(self._chance.random()))
        await self._leave(ask(text, max_tokens=8), Departure(seconds=self._chance.uniform(0.02, 1.5)))

    async def _leave_answer(self) -> None:
        question = replace(self._draw_question(), max_tokens=200)
        if self._chance.random() < 0.3:
            await self._leave(question, Departure(seconds=self._chance.uniform(0.05, 1.0)))
        else:
            await self._leave(question, Departure(size=self._chance.randrange(1, 3000)))

    async def _leave(self, question: Question, departure: Departure) -> None:
        """Ask and leave; the conversation stays as it was, even if the answer came first."""
        self._kind = "too late to leave"
        await self._send(question, departure)
