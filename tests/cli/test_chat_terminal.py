"""`dragoman chat` at a terminal: a pty, a program of its own behind it, and keys that are pressed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import dragoman
from dragoman.engines.scripted import Script, say
from dragoman.types import Job
from tests.media import samples
from tests.support.parrot import messages_of, parrot
from tests.support.terminal import CTRL_C, Terminal, terminal

PROMPT, MORE, ALT_ENTER = "›", "…", "\x1b\r"
PLAIN = "import sys; sys.modules['readline'] = None; from dragoman.cli import main; main()"


@contextmanager
def chatting(url: str, home: Path, *how: str) -> Iterator[Terminal]:
    command = [sys.executable, *(how or ("-m", "dragoman")), "chat", "--url", url]
    with terminal(command, {"XDG_DATA_HOME": str(home), "INPUTRC": "/dev/null"}) as person:
        yield person


def answer(job: Job) -> Script:
    """What was said, or the same word for a long time."""
    text = messages_of(job)[-1][1]
    return say("tick " * 1000) if text == "go" else say(f"<{text}>".replace("\n", "|"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with dragoman.background(parrot(answer=answer, interval=0.005)) as url:
        yield url


def test_pastes_keys_and_a_memory(url: str, tmp_path: Path) -> None:
    with chatting(url, tmp_path) as person:
        person.see(PROMPT)
        person.press("\x1b[200~one\rtwo\x1b[201~")
        person.see("two")
        person.press("\r")
        person.see("<one|two>")
        person.see(PROMPT)
        person.press(f"a{ALT_ENTER}b\r")
        person.see("<a|b>")
        person.see(PROMPT)
        person.press('"""c\r')
        person.see(MORE)
        person.press('d"""\r')
        person.see("<c|d>")
        person.see(PROMPT)
        person.press("/bye\r")
        assert person.end() == 0
    with chatting(url, tmp_path) as person:
        person.see(PROMPT)
        # /bye, the lines between quotes, and what was typed with Alt+Enter.
        person.press("\x1b[A\x1b[A\x1b[A\r")
        person.see("<a|b>")
        person.see(PROMPT)
        person.press("\x04")
        assert person.end() == 0


def test_ctrl_c_stops_an_answer_and_twice_the_program(url: str, tmp_path: Path) -> None:
    with chatting(url, tmp_path) as person:
        person.see(PROMPT)
        person.press("go\r")
        person.see("tick tick")
        person.press(CTRL_C)
        person.see("stopped")
        person.see(PROMPT)
        person.press("still here\r")
        person.see("<still here>")
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
    picture.write_bytes(samples.picture("png"))
    with chatting(url, tmp_path, "-c", PLAIN) as person:
        person.see(PROMPT)
        person.press("one\ntwo\nthree\n")
        person.see("<one|two|three>")
        person.see(PROMPT)
        person.press(f"What is {picture}\n")
        person.see("images are not supported")
        person.see(PROMPT)
        person.press("/bye\n")
        assert person.end() == 0
