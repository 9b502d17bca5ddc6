"""The administrator: adapters and models come and go, pictures are shown, the server is restarted."""

import asyncio
import time
from base64 import b64encode
from random import Random

from msgspec.structs import replace

from tests.media.samples import picture
from tests.soak.client import Client
from tests.soak.fault import Fault
from tests.soak.files import ADAPTERS, SEEING, TINY
from tests.soak.question import Question
from tests.soak.server import Server
from tests.soak.topics import TOPICS, ask

NAME = "the administrator"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LOAD_MODEL, UNLOAD_MODEL = "/models/load", "/models/unload"
COLOURS = ("red", "blue")
PAUSE_S = 1.0
KINDS = ("adapter loaded", "adapter unloaded", "model loaded", "model unloaded", "picture shown", "restart")


class Administrator:
    def __init__(self, server: Server, client: Client, chance: Random) -> None:
        self._server = server
        self._client = client
        self._chance = chance
        self._kinds = client.ledger.kinds
        self._turn = 0

    async def work(self, until: float) -> None:
        """Do one duty after the other until that time."""
        duties = (self._change_adapter, self._change_model, self._show_picture)
        while time.monotonic() < until and not self._client.ledger.over.is_set():
            await duties[self._turn % len(duties)]()
            self._turn += 1
            await asyncio.sleep(min(PAUSE_S, max(until - time.monotonic(), 0)))

    async def _ask(self, question: Question, kind: str = "") -> None:
        stream = self._chance.random() < 0.5
        await self._client.ask(NAME, "chat", replace(question, temperature=0.0), stream=stream, kind=kind)

    async def _change_adapter(self) -> None:
        name = self._chance.choice(ADAPTERS)
        await self._client.command(LOAD_ADAPTER, {"lora_name": name, "lora_path": name})
        self._kinds["adapter loaded"] += 1
        question = ask(self._chance.choice(TOPICS), model=name)
        await asyncio.gather(*(self._ask(question, "adapter asked") for _ in range(2)))
        await self._client.command(UNLOAD_ADAPTER, {"lora_name": name})
        self._kinds["adapter unloaded"] += 1

    async def _change_model(self) -> None:
        """Load the tiny model, ask it, and unload it while it answers."""
        question = ask("ab", model=TINY, max_tokens=32)
        with self._client.windows.announce_change(TINY):
            await self._client.command(LOAD_MODEL, {"model": TINY})
            await self._ask(question)
            self._kinds["model loaded"] += 1
            asking = asyncio.gather(*(self._ask(question) for _ in range(3)))
            await asyncio.sleep(self._chance.uniform(0, 0.1))
            await self._client.command(UNLOAD_MODEL, {"model": TINY})
            await asking
        self._kinds["model unloaded"] += 1

    async def _show_picture(self) -> None:
        data = b64encode(picture("png", 64, 48, self._chance.choice(COLOURS))).decode()
        shown = ask("What is this?", model=SEEING, picture=f"data:image/png;base64,{data}", max_tokens=8)
        with self._client.windows.announce_change(SEEING):
            await self._ask(shown, "picture shown")
            await self._ask(shown, "picture shown")
            await self._client.command(UNLOAD_MODEL, {"model": SEEING})

    async def restart(self) -> None:
        """A server that does not stop, or does not come back, ends the soak."""
        with self._client.windows.announce_restart():
            try:
                await self._server.stop()
                await self._server.start()
            except Fault as fault:
                self._client.ledger.fail(NAME, fault)
                self._client.ledger.over.set()
                return
        self._kinds["restart"] += 1
