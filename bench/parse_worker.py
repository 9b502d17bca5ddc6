"""A parser in an interpreter of its own, and what it made of a case."""

import json
import os
import select
import subprocess
from contextlib import suppress
from types import TracebackType
from typing import Any

from msgspec import Struct

from bench.errors import BenchError
from bench.parse_cases import TOOLS, Case, vocabulary
from bench.process import LOGS, ROOT

LIMIT_S = 60
OURS, VLLM, SGLANG = "dragoman", "vLLM", "SGLang"


class Outcome(Struct, frozen=True, kw_only=True):
    """One parser on one case."""

    parser: str
    case: str
    mode: str
    long: bool
    tokens: int
    us: float = 0.0
    """Processor time for one token, in microseconds."""
    right: bool = False
    right_at_16: bool = False
    error: str = ""
    rounds: list[float] = []


class Worker:
    """`with Worker(...) as worker: worker.read(case, passes=10)`"""

    def __init__(self, name: str, python: str, module: str, core: int) -> None:
        self.name = name
        self._command = [python, "-m", module]
        self._core = core

    def __enter__(self) -> "Worker":
        self._start()
        return self

    def _start(self) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log = LOGS / f"parse-{self.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Strings that hash alike in every run make for figures that do.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        os.sched_setaffinity(self._process.pid, {self._core})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def name_of(self, case: Case) -> str:
        """What this one calls the format of a case; "" if it has none."""
        return {OURS: case.ours, VLLM: case.vllm, SGLANG: case.sglang}[self.name]

    def read(self, case: Case, *, passes: int, chunk: int = 1) -> Outcome:
        ids = vocabulary(case)
        reply = self._ask(
            {
                "mode": case.mode,
                "parser": self.name_of(case),
                "tools": TOOLS,
                "vocabulary": ids,
                "tokens": [(ids[token], token) for token in case.tokens],
                "chunk": chunk,
                "passes": passes,
            }
        )
        return Outcome(
            parser=self.name,
            case=case.name,
            mode=case.mode,
            long=case.long,
            tokens=len(case.tokens),
            us=reply.get("us", 0.0),
            right=_right(case, reply),
            error=reply.get("error", ""),
        )

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        if not ready:
            self._stop()
            self._start()
            return {"error": f"no answer within {LIMIT_S} seconds"}
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            raise BenchError("\n".join([f"{self.name} did not answer; its last words:", *words]))
        reply: dict[str, Any] = json.loads(line)
        return reply


def _right(case: Case, reply: dict[str, Any]) -> bool:
    """Whether what was read is what was said; space at the ends of texts is a matter of taste."""
    if "error" in reply:
        return False
    if case.mode == "call":
        return [(name, _decoded(text)) for name, text in reply["calls"]] == [("write_file", case.arguments)]
    pair = (reply["text"].strip(), reply["reasoning"].strip())
    return pair == (case.text, case.reasoning)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
