"""A process that compiles what may take for ever, or crash: `python -m dragoman.constrain.examiner`.

It reads grammars and says of each whether it can be compiled within the budget. Every one is compiled in a
child of its own, which dies of what is wrong with it.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from dragoman.constrain.budget import FINE, LENGTH, REFUSED, compile_grammar
from dragoman.constrain.vocabulary import byte_vocabulary

SECONDS = 0.25
"""Of processor time, so that a busy machine refuses nothing that an idle one takes."""
BYTES = 64 * 1024 * 1024


def answer_all(questions: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more questions, which is when whoever asks is gone."""
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
    """What is merely wrong with the grammar is found again, and told, by whoever asks."""
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
