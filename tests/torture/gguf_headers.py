"""Headers of GGUF files that were tampered with.

Each is opened in a process of its own kind, which says what became of it or dies: this module, as a program.
The server's process is in the place of the one that runs it, and must get by.
"""

import os
import resource
import select
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer, check_file
from dragoman.engines.local.llamacpp import LlamaRunner
from dragoman.engines.local.runner import StepFailed
from dragoman.errors import DragomanError
from tests.support.tiny_gguf import numbers, write_tiny
from tests.torture.page import Row, progress, scaled

HEADERS = 10_000
ODD = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
MOST_MEMORY = 8 << 30
PATIENCE_S = 60


def tampered(whole: bytes, entries: list[list[tuple[int, int]]], chance: Random) -> bytes:
    data = bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at, size = chance.choice(chance.choice(entries))
        way = chance.random()
        if way < 0.6:
            data[at : at + size] = (chance.choice(ODD) % 2 ** (8 * size)).to_bytes(size, "little")
        elif way < 0.9:
            offset = at + chance.randrange(size) if size else at
            data[offset] ^= 1 << chance.randrange(8)
        else:
            del data[chance.randrange(4, len(data)) :]
            break
    return bytes(data)


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    count = scaled(HEADERS, scale)
    with tempfile.TemporaryDirectory() as folder:
        seen = Counter(_outcomes(Path(folder), count, seed))
    hung = seen["hung"]
    strange = sum(number for what, number in seen.items() if what.startswith("raised"))
    figure = ", ".join(f"{number} {what}" for what, number in seen.most_common())
    return [
        Row(f"{count:,} tampered headers: refused, or the process dies alone", figure, "all", not strange),
        Row("none of them is waited for in vain", f"{hung} hung", "0", not hung),
    ]


def _outcomes(folder: Path, count: int, seed: int) -> list[str]:
    whole = write_tiny(folder / "whole.gguf")
    data, entries = whole.read_bytes(), numbers(whole)
    chance, outcomes = Random(seed), []
    opener = _Opener(folder)
    for number in range(count):
        file = folder / "model.gguf"
        # Another file each time: the last one may still be mapped.
        file.unlink(missing_ok=True)
        file.write_bytes(tampered(data, entries, chance))
        outcomes.append(opener.outcome(file))
        progress(number + 1, count, "headers")
    opener.close()
    return outcomes


class _Opener:
    """A process that opens one file after the other, and another one when it has died."""

    def __init__(self, folder: Path) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log = (folder / "log").open("w")

    def outcome(self, file: Path) -> str:
        process = self._process = self._process or self._begin()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{file}\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
            process.kill()
            process.communicate()
            self._process = None
            return "hung"
        text = process.stdout.readline().strip()
        if text:
            return text
        self._process = None
        process.communicate()
        return f"died by signal {-process.returncode}"

    def _begin(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.torture.gguf_headers"]
        return subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
        self._log.close()


def open_files() -> None:
    """Opens what it is told and says what became of it."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The native library prints before it dies.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(_became(Path(line.strip())), file=answers, flush=True)


def _became(path: Path) -> str:
    try:
        check_file(path)
    except DragomanError:
        return "early"
    try:
        model = LlamaModel(path)
        LlamaTokenizer(model).encode("ab")
        LlamaRunner(model, slots=1, context=32, batch=8, threads=1, flash_attention=True).warm_up()
        return "loaded"
    except (DragomanError, StepFailed):
        return "refused"
    except Exception as error:
        return f"raised {type(error).__name__}"


if __name__ == "__main__":
    open_files()
