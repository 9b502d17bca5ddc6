"""User input: editable lines with history, messages of several lines, paths of files.

A paste is one message. A terminal with bracketed paste marks its beginning and end, and GNU readline inserts
it into the line as it is. With another line editor, or none, lines that are available at once after the first
one count as the rest of a paste: no user types a line within `AT_ONCE_S`.
"""

import os
import re
import select
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dragoman.cli.exits import CommandError

AT_ONCE_S = 0.03
FENCE = '"""'
MORE = "… "
REMEMBERED, REMEMBERED_BYTES = 1000, 1 << 20
SOUNDS = (".wav", ".mp3", ".flac")
LARGEST_FILE = 10 << 20
_FROM, _TO = r"(?:file://|~?\.{0,2}/)", r"\.(?:png|jpe?g|webp|gif|wav|mp3|flac)"
_PATH = re.compile(
    rf"""(?P<quote>['"])(?P<quoted>{_FROM}[^'"\n]+{_TO})(?P=quote)"""
    rf"""|(?<!\S)(?P<bare>{_FROM}(?:\\.|[^\s\\'"])*{_TO})(?=[\s,;:?!]|\.(?:\s|$)|$)""",
    re.IGNORECASE,
)
"""The path of an image or audio file: in quotes, or with a backslash before each space, as terminals write
the path of a file that is dropped on them.
"""


class MessageReader:
    r"""Reads messages: a line, lines between three quotes, or several lines that end with \."""

    def __init__(self, read_line: Callable[[str], str] = input, memory: "InputHistory | None" = None) -> None:
        self._read_line, self.memory = read_line, memory
        self.pastes_whole = True
        """If False, a paste arrives line by line."""
        self.recall: Callable[[str], None] = lambda _: None
        """Called with each message, to add it to the history of the arrow keys."""

    def read(self, prompt: str) -> str:
        lines = [self._read_line(prompt), *self._waiting()]
        if lines[0].lstrip().startswith(FENCE):
            message = self._fenced(lines)
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines += [self._read_line(MORE), *self._waiting()]
            message = "\n".join(lines)
        message = message.strip()
        if message:
            self.recall(message)
            if self.memory is not None:
                self.memory.add(message)
        return message

    def _fenced(self, lines: list[str]) -> str:
        text = "\n".join(lines).lstrip().removeprefix(FENCE)
        while not text.rstrip().endswith(FENCE):
            text += "\n" + "\n".join([self._read_line(MORE), *self._waiting()])
        return text.rstrip().removesuffix(FENCE)

    def _waiting(self) -> Iterable[str]:
        while not self.pastes_whole and _is_waiting():
            yield self._read_line("")


def _is_waiting() -> bool:
    with suppress(OSError, ValueError):
        return bool(select.select([sys.stdin], [], [], AT_ONCE_S)[0])
    return False


class InputHistory:
    """History of typed messages across chats: a file that only its owner can read, one JSON string per
    line.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.on = file, True

    def load(self) -> list[str]:
        """Return the latest messages. A file that has grown too long is shortened."""
        try:
            data = self.file.read_bytes()
        except OSError:
            return []
        latest = data[-REMEMBERED_BYTES:].splitlines()[-REMEMBERED:]
        if len(data) > REMEMBERED_BYTES or data.count(b"\n") > 2 * REMEMBERED:
            self._write(latest)
        texts = []
        for line in latest:
            with suppress(msgspec.DecodeError):
                texts.append(msgspec.json.decode(line, type=str))
        return texts

    def add(self, message: str) -> None:
        """Append a message. If the file cannot be written, the chat continues without a warning."""
        line = msgspec.json.encode(message) + b"\n"
        if not self.on or len(line) > REMEMBERED_BYTES // 16:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # One write at the end of the file, so that two concurrent chats do not overwrite each other.
            offset = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(offset, line)
            finally:
                os.close(offset)

    def _write(self, lines: Sequence[bytes]) -> None:
        with suppress(OSError):
            offset, name = tempfile.mkstemp(dir=self.file.parent)
            with os.fdopen(offset, "wb") as file:
                file.writelines(line + b"\n" for line in lines)
            os.replace(name, self.file)


def edit_lines(reader: MessageReader, complete: Callable[[str], list[str]]) -> None:
    """Enable line editing, history and completion for `input`; `complete` returns the completions of a
    line.
    """
    try:
        import readline
    except ImportError:
        reader.pastes_whole = False
        return
    if "libedit" in (readline.__doc__ or ""):
        reader.pastes_whole = False
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        for value in ("set enable-bracketed-paste on", r'"\e\C-m": "\C-v\C-j"', "tab: complete"):
            readline.parse_and_bind(value)
    readline.set_auto_history(False)
    reader.recall = readline.add_history
    # Complete the whole line: names may contain any character.
    readline.set_completer_delims("")
    readline.set_completer(lambda line, number: (complete(line) + [None] * (number + 1))[number])
    for line in reader.memory.load() if reader.memory is not None else ():
        readline.add_history(line)


def is_line_empty() -> bool:
    """Whether the line was empty when Ctrl-C was pressed."""
    with suppress(ImportError):
        import readline

        return not readline.get_line_buffer().strip()
    return True


def content_of(message: str, beside: str = "") -> str | list[dict[str, Any]]:
    """Split a message with file paths into content parts, such as `What is this? ./cat.png`.

    A path without a file stays text; without files the content is one text, which includes `beside`.
    """
    files = {match.group(): _file_of(match) for match in _PATH.finditer(message)}
    files = {path: file for path, file in files.items() if file.is_file()}
    text = _PATH.sub(lambda match: "" if match.group() in files else match.group(), message).strip()
    text = "\n\n".join(part for part in (text, beside) if part)
    if not files:
        return text
    shown = [_show_file(file) for file in files.values()]
    return [*([{"type": "text", "text": text}] if text else []), *shown]


def _file_of(match: re.Match[str]) -> Path:
    path = match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])
    return Path(path.removeprefix("file://")).expanduser()


def _show_file(file: Path) -> dict[str, Any]:
    # Imported here: most chats attach no files.
    from dragoman.client import FileFormatError, audio, image

    try:
        if file.stat().st_size > LARGEST_FILE:
            raise CommandError(f"{file} is larger than {LARGEST_FILE >> 20} MiB.", "Make it smaller first.")
        return audio(file) if file.suffix.lower() in SOUNDS else image(file)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.") from error
    except FileFormatError as error:
        raise CommandError(str(error)) from None
