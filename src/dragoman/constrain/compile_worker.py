"""Process that compiles grammars which may take minutes or crash: `python -m
dragoman.constrain.compile_worker`.

It reads grammars and reports whether each can be compiled within the budget. Each is compiled in a forked
child, which the limits kill.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from dragoman.constrain.compile_limits import FINE, LENGTH, REFUSED, compile_grammar
from dragoman.constrain.vocabulary import byte_vocabulary

SECONDS = 0.25
"""Limit on processor time, not wall time, so that a busy machine accepts the same grammars as an idle one."""
BYTES = 64 * 1024 * 1024


def answer_all(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions until the input ends, when the server closed it or exited."""
    byte_vocabulary()
    while head := questions.read(LENGTH.size):
        grammar = questions.read(*LENGTH.unpack(head)).decode()
        answers.write(FINE if _compiles(grammar) else REFUSED)
        answers.flush()


def _compiles(grammar: str) -> bool:
    child = os.fork()
    if child == 0:
        _compile(grammar)
    _, status = os.waitpid(child, 0)
    return status == 0


def _compile(grammar: str) -> None:
    """Compile a grammar and exit. Errors in the grammar itself are not reported: the
    server finds them again.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    native = compile_grammar(byte_vocabulary(), grammar)
    if not native.is_error():
        native.compute_bitmask()
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer_all(sys.stdin.buffer, sys.stdout.buffer)
