"""Grammars that another process has compiled within the budget before we do.

llguidance counts its work, but not all of it: `/(.{97})*/ & /(.{89})*/ & /(.{83})*/` keeps it busy for
minutes. Nothing stops it in our own process, so such grammars are tried out in one that can be killed.
"""

import logging
import struct
import subprocess
import sys
from collections import OrderedDict
from hashlib import sha256
from threading import Lock

from dragoman.errors import BadRequest

logger = logging.getLogger("dragoman.constrain")

MOST_KEPT = 4096
"""Verdicts, the last ones."""
LENGTH = struct.Struct("!I")
FINE, REFUSED = b"+", b"-"


class Examiner:
    """Threads may share it: they are answered one after the other."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Raises where it cannot be compiled within the budget."""
        key = sha256(grammar.encode()).digest()
        with self._lock:
            fine = self._verdicts.get(key)
            if fine is None:
                fine = self._verdicts[key] = self._ask(grammar.encode())
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > MOST_KEPT:
                self._verdicts.popitem(last=False)
        if not fine:
            message = "This takes too long to compile, or too much memory; make it simpler."
            raise BadRequest(message, code="limit_exceeded")

    def _ask(self, grammar: bytes) -> bool:
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(LENGTH.pack(len(grammar)) + grammar)
            process.stdin.flush()
            return process.stdout.read(1) == FINE
        except OSError:
            logger.exception("Grammars cannot be tried out beforehand")
            return False

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dragoman.constrain.examiner"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._process


_examiner: Examiner | None = None


def examine() -> None:
    """From now on. A server does so; who compiles grammars of their own need not."""
    global _examiner
    if _examiner is None and sys.platform == "linux":
        _examiner = Examiner()


def check_examined(grammar: str) -> None:
    """Raises for a grammar that takes too much, where grammars are examined.

    Only where languages are intersected or inverted can few characters mean very many states.
    """
    if _examiner is not None and ("&" in grammar or "~" in grammar):
        _examiner.check(grammar)
