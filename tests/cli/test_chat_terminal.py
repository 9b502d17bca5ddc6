"""`dragoman chat` at a terminal: a pty, a program of its own behind it, and keys that are pressed."""

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import dragoman
from dragoman.engines.scripted import Script, say
from dragoman.types import Job
from tests.support.parrot import messages_of, parrot

PROMPT, MORE, CTRL_C, ALT_ENTER = "›", "…", "\x03", "\x1b\r"
PATIENCE_S = 60
PLAIN = "import sys; sys.modules['readline'] = None; from dragoman.cli import main; main()"


class Terminal:
    """A person at a terminal."""

    def __init__(self, place: int, process: int) -> None:
        self._place, self._process, self._seen = place, process, b""

    def see(self, text: str) -> str:
        """What stands on the screen up to that text, which is waited for."""
        wanted, deadline = text.encode(), time.monotonic() + PATIENCE_S
        while wanted not in self._seen:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self._place], [], [], left)[0]:
                raise TimeoutError(f"no {text!r} in {self._seen!r}")
            self._seen += os.read(self._place, 65536)
        before, _, self._seen = self._seen.partition(wanted)
        return before.decode()

    def press(self, keys: str) -> None:
        os.write(self._place, keys.encode())

    def say(self, line: str) -> str:
        """Type a line at the prompt, and see all up to the next prompt."""
        self.see(PROMPT)
        self.press(f"{line}\r")
        return self.see("\x1b[2m")

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C till the text is seen: readline may miss one that comes between two keys."""
        while text.encode() not in self._seen:
            self.press(CTRL_C)
            while text.encode() not in self._seen and select.select([self._place], [], [], 0.5)[0]:
                self._seen += os.read(self._place, 65536)
        self.see(text)

    def end(self) -> int:
        """The exit code of the program, once it has left."""
        with suppress(OSError):
            while os.read(self._place, 65536):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


@contextmanager
def terminal(url: str, home: Path, *how: str) -> Iterator[Terminal]:
    process, place = pty.fork()
    if process == 0:
        flags = how or ("-m", "dragoman")
        variables = {**os.environ, "XDG_DATA_HOME": str(home), "TERM": "xterm", "INPUTRC": "/dev/null"}
        os.execve(sys.executable, [sys.executable, *flags, "chat", "--url", url], variables)
    try:
        yield Terminal(place, process)
    except BaseException:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise
    finally:
        os.close(place)


def answer(job: Job) -> Script:
    """What was said, or the same word for a long time."""
    text = messages_of(job)[-1][1]
    return say("tick " * 1000) if text == "go" else say(f"<{text}>".replace("\n", "|"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with dragoman.background(parrot(answer=answer, interval=0.005)) as url:
        yield url


def test_pastes_keys_and_a_memory(url: str, tmp_path: Path) -> None:
    with terminal(url, tmp_path) as person:
        person.see(PROMPT)
        person.press("\x1b[200~one\rtwo\x1b[201~")
        person.see("two")
        person.press("\r")
        person.see("<one|two>")
        assert "<a|b>" in person.say(f"a{ALT_ENTER}b")
        person.see(PROMPT)
        person.press('"""c\r')
        person.see(MORE)
        person.press('d"""\r')
        person.see("<c|d>")
        person.see(PROMPT)
        person.press("/bye\r")
        assert person.end() == 0
    with terminal(url, tmp_path) as person:
        person.see(PROMPT)
        # /bye, the lines between quotes, and what was typed with Alt+Enter.
        person.press("\x1b[A\x1b[A\x1b[A\r")
        person.see("<a|b>")
        person.see(PROMPT)
        person.press("\x04")
        assert person.end() == 0


def test_ctrl_c_stops_an_answer_and_twice_the_program(url: str, tmp_path: Path) -> None:
    with terminal(url, tmp_path) as person:
        person.see(PROMPT)
        person.press("go\r")
        person.see("tick tick")
        person.press(CTRL_C)
        person.see("stopped")
        assert "<still here>" in person.say("still here")
        person.see(PROMPT)
        person.press("half")
        person.see("half")
        person.interrupt(PROMPT)
        person.interrupt("Ctrl-C again")
        person.see(PROMPT)
        with suppress(OSError):
            person.interrupt("no program is there to say this")
        assert person.end() == 130


def test_a_paste_where_there_is_no_line_editor(url: str, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"png")
    with terminal(url, tmp_path, "-c", PLAIN) as person:
        person.see(PROMPT)
        person.press("one\ntwo\nthree\n")
        person.see("<one|two|three>")
        person.see(PROMPT)
        person.press(f"What is {picture}\n")
        person.see("images are not supported")
        person.see(PROMPT)
        person.press("/bye\n")
        assert person.end() == 0
