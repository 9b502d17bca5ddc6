"""A chat session in a terminal: reads questions, prints answers as they stream, keeps the history."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
from msgspec import Struct

from dragoman.cli.exits import CommandError, report
from dragoman.cli.line_input import MessageReader, content_of, is_line_empty
from dragoman.cli.parser import nearest
from dragoman.cli.terminal import visible
from dragoman.client import (
    Client,
    FinishEvent,
    ReasoningDelta,
    RefusalDelta,
    StreamEvent,
    TextDelta,
    UsageEvent,
)
from dragoman.errors import DragomanError
from dragoman.logs import Colorizer
from dragoman.types import Usage

HELP = '''\
/set                show settings; /set temperature 0.2 sets a request field, /unset temperature removes it
/set system TEXT    set the system prompt
/set schema FILE    answers match a JSON Schema (a file, or the schema itself); /set json: any JSON
/set think|nothink  turn reasoning on or off, if the template supports it; /set think low|medium|high: effort
/set quiet|verbose  hide or show the statistics after an answer
/set nohistory      stop saving typed lines; /set history: save them
/model [NAME]       list the models, or switch to another one
/history            show the conversation
/clear              forget the conversation
/save FILE          save conversation and settings as a request body; /load FILE continues from one
/bye                leave (or Ctrl-D, or Ctrl-C twice)
/help               show this help
A paste is one message, and so are lines between """ and """; a line that ends with \\ continues, and
Alt+Enter begins a new line. The path of an image or audio file (./a.png, /a/b.jpg, ~/c.wav) attaches it.
Ctrl-C stops an answer.'''
PARTS = {"text": "", "image_url": "image", "input_audio": "sound"}
NOT_SET = frozenset({"messages", "model", "stream", "stream_options", "n", "prompt_token_ids", "input_ids"})
"""Fields that the chat sets itself or could not show."""


class PrintedAnswer(Struct):
    text: str = ""
    usage: Usage | None = None
    finish: str | None = None
    seconds: float = 0.0
    first_s: float | None = None
    stopped: bool = False
    thinks: bool = False
    """Whether the last printed text is reasoning."""


@contextmanager
def _stopped_by_ctrl_c(answer: PrintedAnswer) -> Iterator[None]:
    """Note Ctrl-C in addition to KeyboardInterrupt, which a library may catch."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: object) -> None:
        answer.stopped = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class ChatSession:
    """A chat session: `ChatSession(client, {"model": "m"}).ask("hi")` prints the answer and stores both."""

    def __init__(
        self, client: Client, fields: Mapping[str, Any], system: str | None = None, out: TextIO | None = None
    ) -> None:
        self.client, self.fields, self.system = client, dict(fields), system
        self.history: list[dict[str, Any]] = []
        self.quiet = False
        self.reader = MessageReader()
        self._out = sys.stdout if out is None else out
        self._paint = Colorizer(self._out)

    def ask(self, question: str, beside: str = "") -> PrintedAnswer:
        """Ask and print the answer as it streams. A failure leaves the history unchanged."""
        rows = [*self.history, {"role": "user", "content": content_of(question, beside)}]
        answer = self._listen(self._start() + rows)
        if answer.text:
            self.history = [*rows, {"role": "assistant", "content": answer.text}]
        return answer

    def _start(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _listen(self, messages: list[dict[str, Any]]) -> PrintedAnswer:
        answer, start = PrintedAnswer(), time.perf_counter()
        stream = self.client.chat(messages, **self.fields)
        with _stopped_by_ctrl_c(answer):
            try:
                for event in stream:
                    if answer.first_s is None and isinstance(event, TextDelta | ReasoningDelta):
                        answer.first_s = time.perf_counter() - start
                    self._hear(event, answer)
                    if answer.stopped:
                        break
            except KeyboardInterrupt:
                answer.stopped = True
            finally:
                # Disconnecting makes the engine stop.
                stream.close()
                answer.seconds = time.perf_counter() - start
        return answer

    def _hear(self, event: StreamEvent, answer: PrintedAnswer) -> None:
        match event:
            case TextDelta() | RefusalDelta():
                if answer.thinks and event.text:
                    self._write("\n\n")
                    answer.thinks = False
                # Stored before it is printed: Ctrl-C may come in between, and printed text belongs to the
                # answer.
                answer.text += event.text
                self._write(event.text)
            case ReasoningDelta() if self._out.isatty():
                # A pipe gets only the answer.
                answer.thinks = answer.thinks or bool(event.text)
                self._write(event.text, "dim")
            case FinishEvent():
                answer.finish = event.reason
            case UsageEvent():
                answer.usage = event.usage

    def _write(self, text: str, style: str | None = None) -> None:
        if text:
            # A pipe gets the model's characters unchanged; a terminal would execute some of them.
            text = visible(text) if self._out.isatty() else text
            self._out.write(self._paint(style, text) if style else text)
            self._out.flush()

    def chat(self, read_line: Callable[[str], str] | None = None) -> int:
        """Read, ask and print until the user leaves."""
        if read_line is not None:
            self.reader = MessageReader(read_line)
        interrupted = False
        while True:
            try:
                line = self.reader.read(self._prompt())
                interrupted = False
            except EOFError:
                print(file=self._out)
                return 0
            except KeyboardInterrupt:
                print(file=self._out)
                empty = is_line_empty()
                if interrupted and empty:
                    raise
                interrupted = empty
                self._say("Ctrl-C again, Ctrl-D or /bye to leave" if empty else "")
                continue
            try:
                if not self._obey(line):
                    return 0
            except KeyboardInterrupt:
                # Between an answer and the next prompt, or before there was one.
                print(file=self._out)

    def _obey(self, line: str) -> bool:
        """Run a command or ask a question; return whether the chat continues."""
        if is_command(line):
            return self.command(line)
        if line:
            self._turn(line)
        return True

    def _prompt(self) -> str:
        # The control characters tell readline that the text between them has no width.
        return "\001\x1b[36m\002› \001\x1b[0m\002" if self._paint.on else "> "

    def _turn(self, line: str) -> None:
        try:
            answer = self.ask(line)
        except DragomanError as error:
            report(error)
            return
        print(file=self._out)
        self._say("" if self.quiet else figures(answer))
        self._say(advice(answer, self.fields, "Say continue, or /set max_tokens N for longer answers."))

    def _say(self, text: str) -> None:
        if text:
            print(self._paint("dim", visible(text)), file=self._out)

    def command(self, line: str) -> bool:
        """Run a /command; return False to leave the chat."""
        name, _, rest = line.partition(" ")
        if name in LEAVING:
            return False
        action = COMMANDS.get(name)
        near = nearest(name, [*COMMANDS, *LEAVING])
        try:
            text = (
                action(self, rest.strip())
                if action
                else f"There is no command {name}; "
                + (f"did you mean {near}?" if near else "/help lists them.")
            )
        except DragomanError as error:
            report(error)
            return True
        self._say(text)
        return True

    def complete(self, line: str) -> list[str]:
        """Return completions of a line: commands, and the names that `/set` and `/model` take."""
        name, space, rest = line.partition(" ")
        if not space:
            return [one + " " for one in (*COMMANDS, *LEAVING) if one.startswith(name)] if name else []
        names: list[str] = []
        if name in ("/set", "/unset"):
            names = [*WAYS, *_settable()] if name == "/set" else list(self.fields)
        elif name == "/model":
            names = self._models()
        return [f"{name} {one} " for one in names if one.startswith(rest)]

    # The commands. Each takes the rest of its line and returns the text to print.

    def set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        if name == "parameter":
            # Ollama's form of the command.
            name, _, value = value.strip().partition(" ")
        value = value.strip()
        if not name:
            shown = {"system": self.system, **self.fields} if self.system else self.fields
            return "\n".join(f"{name}  {_shown(value)}" for name, value in shown.items())
        way = WAYS.get(name)
        return way(self, value) if way else self._set_field(name, value)

    def _set_field(self, name: str, value: str) -> str:
        fields = _settable()
        name = _own_name(name)
        if name not in fields:
            near = nearest(name, [*fields, *WAYS])
            hint = f"Did you mean {near}?" if near else "/help lists what can be set."
            raise CommandError(f"There is no setting {name}.", hint)
        if value:
            self.fields[name] = _read_value(name, value, fields[name])
        return f"{name}  {_shown(self.fields[name])}" if name in self.fields else f"{name} is not set."

    def unset(self, name: str) -> str:
        if name == "system":
            self.system = None
        elif self.fields.pop(_own_name(name), None) is None:
            raise CommandError(f"{name or 'Nothing'} is not set.", "/set shows the settings.")
        return f"{name} is not set anymore."

    def _say_system(self, text: str) -> str:
        self.system = text.strip('"') or self.system
        return f"system: {self.system}" if self.system else "No system prompt; /set system TEXT sets one."

    def _set_schema(self, value: str) -> str:
        if not value:
            return self._set_field("response_format", "")
        text = value if value.startswith("{") else _read_file(value)
        try:
            schema = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise CommandError(
                "The schema is not a valid JSON object.", f"The parser says: {error}."
            ) from error
        named = {"name": "answer", "schema": schema, "strict": True}
        self.fields["response_format"] = {"type": "json_schema", "json_schema": named}
        return "Answers are JSON that matches the schema; /unset response_format ends that."

    def _set_json(self, _: str) -> str:
        self.fields["response_format"] = {"type": "json_object"}
        return "Answers are JSON; /unset response_format ends that."

    def _set_thinking(self, effort: str, thinks: bool = True) -> str:
        if effort:
            return self._set_field("reasoning_effort", effort)
        self.fields["chat_template_kwargs"] = {"enable_thinking": thinks}
        return f"Reasoning is turned {'on' if thinks else 'off'}, if the template supports it."

    def _set_quiet(self, quiet: bool) -> str:
        self.quiet = quiet
        return "" if quiet else "Statistics are shown after each answer."

    def _set_memory(self, on: bool) -> str:
        if self.reader.memory is not None:
            self.reader.memory.on = on
        return f"Typed lines are {'' if on else 'not '}saved for the next chat."

    def _models(self) -> list[str]:
        return [str(model["id"]) for model in self.client.models()]

    def choose_model(self, name: str) -> str:
        models = self._models()
        if not name:
            return "\n".join(f"{'*' if one == self.fields['model'] else ' '} {one}" for one in models)
        if name not in models:
            near = nearest(name, models)
            hint = f"Did you mean {near}?" if near else "/model lists them."
            raise CommandError(f"The server at {self.client.url} has no model {name}.", hint)
        self.fields["model"] = name
        return f"{name} answers from now on."

    def clear(self, _: str) -> str:
        self.history = []
        return "The conversation is cleared."

    def show(self, _: str) -> str:
        rows = self._start() + self.history
        return "\n".join(f"{m['role']}: {_shown(m['content'])}" for m in rows) or "No messages yet."

    def save(self, name: str) -> str:
        body = msgspec.json.encode({**self.fields, "messages": self._start() + self.history})
        try:
            with Path(name or ".").expanduser().open("xb") as file:
                file.write(msgspec.json.format(body, indent=2) + b"\n")
        except FileExistsError as error:
            raise CommandError(f"{name} already exists.", "Choose another name.") from error
        except OSError as error:
            raise CommandError(f"{name or 'That'} cannot be written: {error.strerror}.") from error
        return f"Saved to {name}; /load {name} continues from it."

    def load(self, name: str) -> str:
        try:
            body = msgspec.json.decode(_read_file(name), type=dict[str, Any])
            messages = msgspec.convert(body.get("messages"), list[SavedMessage])
        except msgspec.DecodeError as error:
            raise CommandError(
                f"{name} is not a file written by /save.", "It must be a JSON object with `messages`."
            ) from error
        rows = [{"role": m.role, "content": m.content} for m in messages if m.role != "system"]
        system = next((m.content for m in messages if m.role == "system"), None)
        self.history, self.system = rows, system if isinstance(system, str) else None
        self.fields |= {field: body[field] for field in _settable() if field in body}
        return f"{len(rows)} messages loaded; {self.fields['model']} continues from them."


class SavedMessage(Struct):
    role: str
    content: str | list[dict[str, Any]]


LEAVING = ("/bye", "/quit", "/exit")
COMMANDS: dict[str, Callable[[ChatSession, str], str]] = {
    "/set": ChatSession.set,
    "/unset": ChatSession.unset,
    "/system": ChatSession._say_system,
    "/model": ChatSession.choose_model,
    "/history": ChatSession.show,
    "/clear": ChatSession.clear,
    "/reset": ChatSession.clear,
    "/save": ChatSession.save,
    "/load": ChatSession.load,
    "/help": lambda _, __: HELP,
    "/?": lambda _, __: HELP,
}
WAYS: dict[str, Callable[[ChatSession, str], str]] = {
    "system": ChatSession._say_system,
    "schema": ChatSession._set_schema,
    "json": ChatSession._set_json,
    "format": lambda talk, value: talk._set_json(value) if value == "json" else talk._set_schema(value),
    "noformat": lambda talk, _: talk.unset("response_format"),
    "think": ChatSession._set_thinking,
    "nothink": lambda talk, _: talk._set_thinking("", thinks=False),
    "quiet": lambda talk, _: talk._set_quiet(True),
    "verbose": lambda talk, _: talk._set_quiet(False),
    "history": lambda talk, _: talk._set_memory(True),
    "nohistory": lambda talk, _: talk._set_memory(False),
}
"""Names that `/set` takes besides request fields."""


def is_command(line: str) -> bool:
    """Whether a line is a command: `/set x` is; `/home/me/cat.png?` and several lines are not."""
    word = line.partition(" ")[0]
    return word.startswith("/") and "\n" not in line and not any(c in word[1:] for c in "/.")


def _settable() -> dict[str, Any]:
    """Return the settable fields of a request with their types."""
    from dragoman.api.chat.request import ChatRequest

    return {one.name: one.type for one in msgspec.structs.fields(ChatRequest) if one.name not in NOT_SET}


def _own_name(name: str) -> str:
    from dragoman.api.compat_fields import RENAMED

    return RENAMED.get(name, name)


def _read_value(name: str, text: str, kind: Any) -> Any:
    """Parse a value: `0.2` is a number, `["a"]` a list, and anything that is not JSON a text."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    for trial in (value, text):
        try:
            msgspec.convert(trial, kind)
        except msgspec.ValidationError as error:
            problem = error
        else:
            return trial
    raise CommandError(f"{name} cannot be {text}.", f"{problem}.")


def _read_file(name: str) -> str:
    try:
        return Path(name or ".").expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CommandError(f"{name or 'That'} cannot be read: {why}.") from error


def _shown(value: Any) -> str:
    """Format a message's content; an attached file is shown by its type."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") in PARTS for part in value
    ):
        return " ".join(str(part.get("text") or f"[{PARTS[part['type']]}]") for part in value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()[:1000]


def advice(answer: PrintedAnswer, fields: Mapping[str, Any], remedy: str) -> str:
    """Return a hint if the answer was cut off."""
    if answer.finish != "length" or answer.stopped:
        return ""
    most = fields.get("max_tokens") or fields.get("max_completion_tokens")
    length = f"{most} tokens" if most else "the server's maximum"
    return f"The answer was cut off at {length}. {remedy}"


def figures(answer: PrintedAnswer) -> str:
    """Format the statistics of an answer: `128 tok  118 tok/s  first 35 ms  length`"""
    parts = []
    if answer.usage is not None:
        parts.append(f"{answer.usage.completion_tokens} tok")
        spent = answer.seconds - (answer.first_s or 0.0)
        if answer.usage.completion_tokens > 1 and spent > 0:
            parts.append(f"{(answer.usage.completion_tokens - 1) / spent:.0f} tok/s")
    if answer.first_s is not None:
        parts.append(f"first {answer.first_s * 1000:.0f} ms")
    if answer.stopped:
        parts.append("stopped")
    elif answer.finish not in (None, "stop"):
        parts.append(str(answer.finish))
    return "  ".join(parts)
