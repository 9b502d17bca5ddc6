"""One soak of one runner: phases of one, two and twenty people, with a rest after each."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from msgspec import Struct

from tests.soak.admin import KINDS, Administrator
from tests.soak.client import LONG_CHARS, Client
from tests.soak.fault import Fault
from tests.soak.ledger import Ledger
from tests.soak.people import TEMPERAMENTS, Person
from tests.soak.probes import Probes
from tests.soak.question import PATHS
from tests.soak.server import Server
from tests.soak.topics import KNOWN, KnownQuestion
from tests.soak.windows import Windows

CROWDS = {1: "one person", 2: "two people", 20: "twenty people"}
ALONE = ("repeating", "impatient", "curious", "steady")
WITH_ANOTHER = ("leaving", "curious", "impatient")
IN_A_CROWD = ("curious", "curious", "curious", "impatient", "repeating", "leaving")
SHORTEST_S, LONGEST_S, PHASES = 10.0, 30.0, 20
RESTARTS = (2, 8, 32, 128)
"""Phases in which the server is restarted, all with twenty people; each life is longer than the last."""
PROVEN_MINUTES = 3.0
"""A run of so many minutes must have done every required kind of action."""
PROGRESS_S = 10.0
LEAVES = ("left before the first byte", "left during the prompt", "left during the answer")
REQUIRED = (
    *CROWDS.values(),
    *(f"{api}, {form}" for api in PATHS for form in ("a stream", "whole")),
    *sorted({act for weights in TEMPERAMENTS.values() for act in weights if not act.startswith("leave")}),
    *LEAVES,
    *KINDS,
    "adapter asked",
    "answer compared",
    "growth measured",
    "probe",
)


class Options(Struct, frozen=True):
    minutes: float = 5.0
    seed: int = 1
    requests: int = 1_000_000
    flags: Sequence[str] = ()
    """Further flags of `dragoman serve`."""


class Soak:
    def __init__(self, server: Server, options: Options) -> None:
        self.ledger = Ledger(server.read_log, options.requests)
        self._server = server
        self._options = options
        self._phase = 0

    async def run(self) -> None:
        try:
            await self._server.start()
            await self._set_up()
            watching = [asyncio.create_task(work) for work in (self._probes.watch(), self._print_progress())]
            try:
                await self._go_on(time.monotonic() + 60 * self._options.minutes)
                self._probes.compare()
            finally:
                for task in watching:
                    # One that has died has seen nothing.
                    task.result() if task.done() else task.cancel()
            await self._server.stop()
            self._probes.read_log()
        except Fault as fault:
            self.ledger.fail("the soak", fault)
        finally:
            self._server.kill()

    async def _set_up(self) -> None:
        model = await self._server.find_model()
        self._client = Client(self._server.url, model, self.ledger, Windows())
        self._probes = Probes(self._server, self._client)
        self._administrator = Administrator(self._server, self._client, Random(self._options.seed))

    async def _go_on(self, end: float) -> None:
        """Collect the known answers from the quiet server, then play phases until the end."""
        for known in KNOWN:
            if not self.ledger.over.is_set():
                await self._ask_known(known)
        while time.monotonic() < end and not self.ledger.over.is_set():
            await self._play(end)
            await self._probes.rest()
            self._phase += 1

    async def _ask_known(self, known: KnownQuestion) -> None:
        kind = "read a document" if len(known.question.messages[0][1]) > LONG_CHARS else ""
        await self._client.ask("the first", known.api, known.question, stream=False, kind=kind)

    async def _play(self, end: float) -> None:
        number = self._phase
        seconds = min(max(60 * self._options.minutes / PHASES, SHORTEST_S), LONGEST_S)
        until = min(time.monotonic() + seconds, end)
        crowd = list(CROWDS)[number % len(CROWDS)]
        people = [self._make_person(offset, crowd) for offset in range(crowd)]
        work = [person.live(until) for person in people]
        if number in RESTARTS:
            work.append(self._restart(until))
        elif crowd > 1:
            # One person alone has a quiet server.
            work.append(self._administrator.work(until))
        await asyncio.gather(*work)
        self.ledger.kinds[CROWDS[crowd]] += 1

    def _make_person(self, offset: int, crowd: int) -> Person:
        """Beside others the first person asks known questions, and must not notice that others leave."""
        chance = Random(f"{self._options.seed} {self._phase} {offset}")
        cycle = self._phase // len(CROWDS)
        temperament = "steady" if offset == 0 else chance.choice(IN_A_CROWD)
        if crowd == 1:
            temperament = ALONE[cycle % len(ALONE)]
        elif offset == 1:
            temperament = WITH_ANOTHER[cycle % len(WITH_ANOTHER)]
        return Person(f"person {offset} of phase {self._phase}", temperament, self._client, chance)

    async def _restart(self, until: float) -> None:
        """Restart the server in the middle of a phase."""
        await asyncio.sleep(max(until - time.monotonic(), 0) / 2)
        self._probes.compare()
        await self._administrator.restart()
        self._probes.forget()

    async def _print_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            print(self.ledger.describe(self._server.measure().resident), flush=True)

    def find_missing(self) -> list[str]:
        """Required kinds of actions that a run of this length never did."""
        proves = self._options.minutes >= PROVEN_MINUTES and not self.ledger.failures
        return self.ledger.find_missing(REQUIRED) if proves else []

    def print_summary(self) -> bool:
        """Print it, and return whether the soak held."""
        missing = self.find_missing()
        for line in self.ledger.summarize(missing):
            print(line)
        for failure in self.ledger.failures:
            print(failure, flush=True)
        print(self.ledger.describe(), flush=True)
        return not self.ledger.failures and not missing


def soak(runner: str, options: Options) -> bool:
    """Run one soak, print its summary, and return whether it held."""
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        run = Soak(Server(runner, Path(folder), options.flags), options)
        asyncio.run(run.run())
        return run.print_summary()
    return False
