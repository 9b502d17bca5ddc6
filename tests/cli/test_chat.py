import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dragoman.cli import main
from dragoman.cli.talk import PrintedAnswer, Talk, figures
from dragoman.client import Client
from dragoman.types import Usage
from tests.cli.conftest import WORDS, Fake
from tests.test_logs import Tty

Capture = pytest.CaptureFixture[str]
ANSWER = "".join(WORDS)


def lines(*said: str | type[BaseException]) -> Callable[[str], str]:
    """A person who types these lines, or a key that raises, and then Ctrl-D."""
    rest: Iterator[str | type[BaseException]] = iter(said)

    def read(_: str) -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


@pytest.fixture
def talk(fake: Fake) -> Iterator[Talk]:
    with Client(fake.url) as client:
        yield Talk(client, {"model": "fake-1"}, out=io.StringIO())


def printed(talk: Talk) -> str:
    assert isinstance(talk._out, io.StringIO)
    return talk._out.getvalue()


def test_one_question(fake: Fake, capsys: Capture) -> None:
    flags = ["--url", fake.url, "--system", "Be brief.", "--temperature", "0", "--max-tokens", "3"]
    assert main(["chat", "hi", "there", *flags]) == 0
    assert capsys.readouterr().out == "".join(WORDS[:3]) + "\n"
    asked = fake.asked[0]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi there"},
    ]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("fake-1", 0, 3)


def test_a_pipe_is_the_question(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", fake.url + "/v1/"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_an_empty_pipe_is_no_question(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 2
    assert "There is no question" in capsys.readouterr().err


def test_the_key_is_sent(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["chat", "hi", "--url", fake.url, "--api-key", "k1"])
    monkeypatch.setenv("OPENAI_API_KEY", "k2")
    main(["chat", "hi", "--url", fake.url])
    assert fake.keys == ["Bearer k1", "Bearer k2"]


def test_nobody_answers(capsys: Capture) -> None:
    assert main(["chat", "hi", "--url", "http://127.0.0.1:1"]) == 1
    assert "Nothing answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_refusal_is_shown_with_the_servers_words(fake: Fake, capsys: Capture) -> None:
    fake.refuses = {"temperature"}
    assert main(["chat", "hi", "--url", fake.url, "--temperature", "1"]) == 1
    assert "answered 400: Unknown field temperature." in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [(None, "hung up in the middle"), ("It broke.", "It broke.")])
def test_a_broken_answer_is_told(fake: Fake, capsys: Capture, words: str | None, message: str) -> None:
    fake.breaks_after, fake.fails_with = 2, words
    assert main(["chat", "hi", "--url", fake.url]) == 1
    captured = capsys.readouterr()
    assert captured.out == "".join(WORDS[:2])
    assert message in captured.err


def test_a_running_server_is_found(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", fake.url.rpartition(":")[2])
    assert main(["chat", "hi"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


def test_talking_keeps_a_history(talk: Talk, fake: Fake) -> None:
    assert talk.chat(lines("one", "", "two")) == 0
    assert [m["content"] for m in fake.asked[1]["messages"]] == ["one", ANSWER, "two"]
    assert "4 tok" in printed(talk)


def test_the_commands(talk: Talk, fake: Fake) -> None:
    said = lines(
        "/system", "/system Be kind.", "one", "/history", "/reset", "/history", "/help", "/no", "/quit", "x"
    )
    assert talk.chat(said) == 0
    assert len(fake.asked) == 1
    assert fake.asked[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    text = printed(talk)
    for part in (
        "no system prompt",
        "user: one",
        f"assistant: {ANSWER}",
        "forgotten",
        "/quit",
        "no command /no",
    ):
        assert part in text
    assert talk.history == []


def test_a_failure_does_not_end_the_talk(talk: Talk, fake: Fake, capsys: Capture) -> None:
    fake.refuses = {"messages"}
    assert talk.chat(lines("one")) == 0
    assert "Unknown field messages" in capsys.readouterr().err
    assert talk.history == []


def test_ctrl_c_stops_one_answer(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = talk.client.chat
    closed = threading.Event()

    def interrupted(messages: Any, **fields: Any) -> Iterator[Any]:
        stream = whole(messages, **fields)
        try:
            yield next(iter(stream))
            raise KeyboardInterrupt
        finally:
            stream.close()
            closed.set()

    monkeypatch.setattr(talk.client, "chat", interrupted)
    answer = talk.ask("one")
    assert answer.stopped
    assert closed.is_set()
    assert talk.history[-1] == {"role": "assistant", "content": WORDS[0]}


def test_ctrl_c_twice_leaves(talk: Talk) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk.chat(lines(KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt))
    assert len(talk.history) == 2


def test_an_answer_cannot_play_with_the_terminal(fake: Fake) -> None:
    fake.words = ["a\x1b]0;title\x07", "\x9b2Jb\n"]
    for out, said in ((Tty(), "a]0;title2Jb\n"), (io.StringIO(), "".join(fake.words))):
        with Client(fake.url) as client:
            Talk(client, {"model": "m"}, out=out).ask("hi")
        assert out.getvalue() == said


def test_figures() -> None:
    answer = PrintedAnswer(usage=Usage(completion_tokens=11), seconds=1.5, first_s=0.5, finish="length")
    assert figures(answer) == "11 tok  10 tok/s  first 500 ms  length"
