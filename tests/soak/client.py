"""Ask the server one question, and write into the ledger what came of it."""

import asyncio
import time
from typing import Any

import httpx

from tests.soak.answer import Answer, read_answer
from tests.soak.connection import Departure, Limits, Reply, exchange
from tests.soak.fault import Fault
from tests.soak.ledger import Ledger
from tests.soak.question import PATHS, Api, Question, spell
from tests.soak.windows import Windows

LONG_CHARS = 4000
"""A body with more characters has a long prompt, which takes seconds to prefill."""


class Client:
    def __init__(
        self, url: str, model: str, ledger: Ledger, windows: Windows, limits: Limits | None = None
    ) -> None:
        self.url = url
        self.ledger = ledger
        self.windows = windows
        self.reading = asyncio.Lock()
        """The lock of the person who waits for a long prompt; others must not start another one."""
        self._model = model
        self._limits = limits or Limits()

    async def ask(
        self,
        person: str,
        api: Api,
        question: Question,
        *,
        stream: bool,
        kind: str = "",
        departure: Departure | None = None,
    ) -> Answer | None:
        """The answer; None if the client left, or met with a fault, which is in the ledger."""
        path, body = PATHS[api], spell(api, question, self._model, stream)
        ledger, began = self.ledger, time.monotonic()
        ledger.count_request()
        try:
            reply = await self._exchange(path, body, stream, departure)
            if reply.has_left:
                ledger.broken_off += 1
                ledger.kinds[_name_departure(reply, departure)] += 1
                return None
            answer = read_answer(api, reply.heard, stream)
            if question.has_known_answer:
                ledger.compare(path, body, answer)
        except Fault as fault:
            if self.windows.excuses(fault, began, question.model):
                ledger.announced += 1
                await self.windows.wait_for_server()
            else:
                ledger.fail(person, fault, path, body)
            return None
        ledger.kinds[f"{api}, {'a stream' if stream else 'whole'}"] += 1
        if kind:
            ledger.kinds[kind] += 1
        return answer

    async def _exchange(
        self, path: str, body: dict[str, Any], stream: bool, departure: Departure | None
    ) -> Reply:
        is_long = len(str(body)) > LONG_CHARS
        limit = self._limits.long_s if is_long else self._limits.whole_s
        silence = self._limits.silence_s if stream else limit
        return await exchange(self.url, path, body, silence, limit, departure)

    async def command(self, path: str, body: dict[str, Any]) -> None:
        """Send an administrator's command, which must succeed."""
        began = time.monotonic()
        self.ledger.count_request()
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=120, verify=False) as client:
                reply = await client.post(path, json=body)
            if reply.status_code != 200:
                raise Fault(
                    "5xx" if reply.status_code >= 500 else "4xx", str(reply.status_code), reply.content
                )
        except httpx.HTTPError as error:
            self._judge(Fault("broken", repr(error)), began, path, body)
        except Fault as fault:
            self._judge(fault, began, path, body)

    def _judge(self, fault: Fault, began: float, path: str, body: dict[str, Any]) -> None:
        if not self.windows.excuses(fault, began):
            self.ledger.fail("the administrator", fault, path, body)


def _name_departure(reply: Reply, departure: Departure | None) -> str:
    if reply.heard.data:
        return "left during the answer"
    return "left before the first byte" if departure and departure.seconds == 0 else "left during the prompt"
