import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli import main
from dragoman.cli.chat_session import ChatSession, PrintedAnswer, advice, figures
from dragoman.cli.line_input import REMEMBERED, InputHistory
from dragoman.client import Client, image
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Usage
from tests.cli.conftest import WORDS, Fake
from tests.media import samples
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
def talk(fake: Fake) -> Iterator[ChatSession]:
    with Client(fake.url) as client:
        yield ChatSession(client, {"model": "fake-1"}, out=io.StringIO())


def printed(talk: ChatSession) -> str:
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
    assert "No question given" in capsys.readouterr().err


def test_the_key_is_sent(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["chat", "hi", "--url", fake.url, "--api-key", "k1"])
    monkeypatch.setenv("OPENAI_API_KEY", "k2")
    main(["chat", "hi", "--url", fake.url])
    assert fake.keys == ["Bearer k1", "Bearer k2"]


def test_nobody_answers(capsys: Capture) -> None:
    assert main(["chat", "hi", "--url", "http://127.0.0.1:1"]) == 1
    assert "No server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_refusal_is_shown_with_the_servers_words(fake: Fake, capsys: Capture) -> None:
    fake.refuses = {"temperature"}
    assert main(["chat", "hi", "--url", fake.url, "--temperature", "1"]) == 1
    assert "answered 400: Unknown field temperature." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"), [(None, "closed the connection in the middle"), ("It broke.", "It broke.")]
)
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


def test_talking_keeps_a_history(talk: ChatSession, fake: Fake) -> None:
    assert talk.chat(lines("one", "", "two")) == 0
    assert [m["content"] for m in fake.asked[1]["messages"]] == ["one", ANSWER, "two"]
    assert "4 tok" in printed(talk)


def test_the_commands(talk: ChatSession, fake: Fake) -> None:
    function = lines(
        "/system", "/system Be kind.", "one", "/history", "/reset", "/history", "/help", "/no", "/quit", "x"
    )
    assert talk.chat(function) == 0
    assert len(fake.asked) == 1
    assert fake.asked[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    text = printed(talk)
    for part in (
        "No system prompt",
        "user: one",
        f"assistant: {ANSWER}",
        "cleared",
        "/bye",
        "no command /no",
    ):
        assert part in text
    assert talk.history == []


def test_what_is_set_goes_along(talk: ChatSession, fake: Fake, tmp_path: Path, capsys: Capture) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    function = lines(
        *("/set temperature 0.2", "/set parameter num_predict 9", "/set stop END", "/set nothink"),
        *(f"/set schema {schema}", "/set tempreature 1", "/set temperature warm", "one"),
        *("/unset temperature", "/unset temperature", "/set noformat", "/set system Be kind.", "two", "/set"),
    )
    assert talk.chat(function) == 0
    first, second = fake.asked
    assert (first["temperature"], first["max_tokens"], first["stop"]) == (0.2, 9, "END")
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert "temperature" not in second and "response_format" not in second
    assert second["messages"][0] == {"role": "system", "content": "Be kind."}
    wrong = capsys.readouterr().err
    assert "Did you mean temperature?" in wrong and "temperature cannot be warm" in wrong
    assert "temperature is not set" in wrong
    assert "max_tokens  9" in printed(talk)


def test_another_model(talk: ChatSession, fake: Fake, capsys: Capture) -> None:
    talk.fields["model"] = "old"
    assert talk.chat(lines("/model", "/model fake-2", "/model fake-1", "one")) == 0
    assert "  fake-1" in printed(talk)
    assert "has no model fake-2" in capsys.readouterr().err
    assert fake.asked[0]["model"] == "fake-1"


def test_a_talk_is_saved_and_goes_on(talk: ChatSession, fake: Fake, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "talk.json"
    talk.system = "Be kind."
    first = ("/set seed 7", "one", f"/save {file}", f"/save {file}", "/clear", "/unset seed")
    assert talk.chat(lines(*first, f"/load {file}", "two", "/load nowhere", f"/load {__file__}")) == 0
    assert [m["content"] for m in fake.asked[1]["messages"]] == ["Be kind.", "one", ANSWER, "two"]
    assert fake.asked[1]["seed"] == 7
    wrong = capsys.readouterr().err
    assert (
        "already exists" in wrong
        and "nowhere cannot be read" in wrong
        and "not a file written by /save" in wrong
    )


def test_messages_of_several_lines(talk: ChatSession, fake: Fake) -> None:
    function = lines(
        '"""one', "", 'two"""', "three \\", "four", '"""five"""', "/not\na command", "/tmp/is no command"
    )
    assert talk.chat(function) == 0
    asked = [body["messages"][-1]["content"] for body in fake.asked]
    assert asked == ["one\n\ntwo", "three \nfour", "five", "/not\na command", "/tmp/is no command"]


def test_an_image_goes_along(talk: ChatSession, fake: Fake, tmp_path: Path) -> None:
    picture = tmp_path / "a cat.png"
    picture.write_bytes(samples.picture("png"))
    talk.ask(f"What is '{picture}'? Not ./nothing.png.")
    assert fake.asked[0]["messages"][0]["content"] == [
        {"type": "text", "text": "What is ? Not ./nothing.png."},
        image(picture),
    ]


def test_a_model_sees_and_hears(tmp_path: Path, capsys: Capture) -> None:
    files = {"cat.png": samples.picture("png"), "meow.WAV": samples.sound("wav")}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    engine = ScriptedEngine(say("A cat."), modalities=("image", "audio"))
    with background(engine, Settings(port=0)) as url:
        question = f"What is {tmp_path}/cat.png and {tmp_path}/meow.WAV?"
        assert main(["chat", question, "--url", url]) == 0
    assert capsys.readouterr().out == "A cat.\n"
    assert [span.media.data for span in engine.jobs[-1].media] == [*files.values()]


def test_a_file_that_is_no_picture_is_not_sent(tmp_path: Path, fake: Fake, capsys: Capture) -> None:
    (tmp_path / "cat.png").write_bytes(b"meow")
    assert main(["chat", f"What is {tmp_path}/cat.png?", "--url", fake.url]) == 1
    assert "not an image" in capsys.readouterr().err and not fake.asked


def test_what_is_piped_in_names_no_image(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"png")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"see {picture}"))
    assert main(["chat", "--url", fake.url]) == 0
    assert fake.asked[0]["messages"][0]["content"] == f"see {picture}"


def test_an_answer_ends_some_time(fake: Fake, capsys: Capture) -> None:
    main(["chat", "hi", "--url", fake.url])
    main(["chat", "hi", "--url", fake.url, "--model", "other"])
    main(["chat", "hi", "--url", fake.url, "--max-tokens", "0"])
    assert [body.get("max_tokens") for body in fake.asked] == [256, 2048, None]


def test_an_answer_that_was_cut_off_is_told() -> None:
    assert "cut off at 9 tokens" in advice(PrintedAnswer(finish="length"), {"max_tokens": 9}, "")
    assert not advice(PrintedAnswer(finish="stop"), {}, "")


def test_lines_are_remembered_within_bounds(tmp_path: Path) -> None:
    memory = InputHistory(tmp_path / "new" / "history")
    for number in range(5):
        memory.add(f"line {number}\nof two")
    memory.on = False
    memory.add("secret")
    assert memory.load() == [f"line {number}\nof two" for number in range(5)]
    assert memory.file.stat().st_mode & 0o777 == 0o600
    with memory.file.open("ab") as file:
        file.write(b"broken\n" + b'"old"\n' * 2 * REMEMBERED + b'"newest"\n')
    assert memory.load()[-2:] == ["old", "newest"]
    assert len(memory.file.read_bytes().splitlines()) == REMEMBERED
    assert memory.file.stat().st_mode & 0o777 == 0o600


def test_completing_a_line(talk: ChatSession) -> None:
    assert talk.complete("/sa") == ["/save "]
    assert "/set temperature " in talk.complete("/set te")
    assert talk.complete("/model f") == ["/model fake-1 "]
    assert talk.complete("hello") == []


def test_a_failure_does_not_end_the_talk(talk: ChatSession, fake: Fake, capsys: Capture) -> None:
    fake.refuses = {"messages"}
    assert talk.chat(lines("one")) == 0
    assert "Unknown field messages" in capsys.readouterr().err
    assert talk.history == []


def test_ctrl_c_stops_one_answer(talk: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ctrl_c_twice_leaves(talk: ChatSession) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk.chat(lines(KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt))
    assert len(talk.history) == 2


def test_an_answer_cannot_play_with_the_terminal(fake: Fake) -> None:
    fake.words = ["a\x1b]0;title\x07", "\x9b2Jb\n"]
    for out, text in ((Tty(), "a]0;title2Jb\n"), (io.StringIO(), "".join(fake.words))):
        with Client(fake.url) as client:
            ChatSession(client, {"model": "m"}, out=out).ask("hi")
        assert out.getvalue() == text


def test_figures() -> None:
    answer = PrintedAnswer(usage=Usage(completion_tokens=11), seconds=1.5, first_s=0.5, finish="length")
    assert figures(answer) == "11 tok  10 tok/s  first 500 ms  length"
