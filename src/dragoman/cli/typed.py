"""What a person types: lines that can be edited and come back, messages of several lines, paths of files.

A paste is one message. A terminal that knows of bracketed paste says where one begins and ends, and GNU
readline puts it into the line as it is. Where Python has another line editor, or none, lines that are there
at once behind the first one are taken for the rest of a paste: nobody types a line within `AT_ONCE_S`.
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

from dragoman.cli.problems import CommandError

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
"""The path of an image or a sound: in quotes, or with a backslash before each space, as terminals write a
file that is dropped on them."""


class MessageReader:
    r"""`read("> ")` is one message: a line, lines between three quotes, or several that end with \."""

    def __init__(self, read_line: Callable[[str], str] = input, memory: "LineMemory | None" = None) -> None:
        self._read_line, self.memory = read_line, memory
        self.pastes_whole = True
        """False: a paste comes line by line."""
        self.recall: Callable[[str], None] = lambda _: None
        """Told of each message, so that the arrow keys bring it back."""

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


class LineMemory:
    """What was typed in earlier talks too, in a file that only its owner can read: a JSON string a line."""

    def __init__(self, file: Path) -> None:
        self.file, self.on = file, True

    def load(self) -> list[str]:
        """The latest ones. A file that has grown too long is made shorter."""
        try:
            data = self.file.read_bytes()
        except OSError:
            return []
        latest = data[-REMEMBERED_BYTES:].splitlines()[-REMEMBERED:]
        if len(data) > REMEMBERED_BYTES or data.count(b"\n") > 2 * REMEMBERED:
            self._write(latest)
        found = []
        for line in latest:
            with suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=str))
        return found

    def add(self, message: str) -> None:
        """Of a memory that cannot be written nothing is said: the talk is what matters."""
        line = msgspec.json.encode(message) + b"\n"
        if not self.on or len(line) > REMEMBERED_BYTES // 16:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # One write at the end of the file, so that two talks at once lose nothing of each other.
            place = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(place, line)
            finally:
                os.close(place)

    def _write(self, lines: Sequence[bytes]) -> None:
        with suppress(OSError):
            place, name = tempfile.mkstemp(dir=self.file.parent)
            with os.fdopen(place, "wb") as file:
                file.writelines(line + b"\n" for line in lines)
            os.replace(name, self.file)


def edit_lines(reader: MessageReader, complete: Callable[[str], list[str]]) -> None:
    """Has `input` edit lines, bring back earlier ones, and complete a line to what `complete` makes of it."""
    try:
        import readline
    except ImportError:
        reader.pastes_whole = False
        return
    if "libedit" in (readline.__doc__ or ""):
        reader.pastes_whole = False
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        for said in ("set enable-bracketed-paste on", r'"\e\C-m": "\C-v\C-j"', "tab: complete"):
            readline.parse_and_bind(said)
    readline.set_auto_history(False)
    reader.recall = readline.add_history
    # What is completed is the whole line, of which a name may have any character.
    readline.set_completer_delims("")
    readline.set_completer(lambda line, number: (complete(line) + [None] * (number + 1))[number])
    for line in reader.memory.load() if reader.memory is not None else ():
        readline.add_history(line)


def is_line_empty() -> bool:
    """Whether nothing stood in the line in which Ctrl-C was pressed."""
    with suppress(ImportError):
        import readline

        return not readline.get_line_buffer().strip()
    return True


def content_of(message: str, beside: str = "") -> str | list[dict[str, Any]]:
    """`What is this? ./cat.png` as the parts of a message; without one, and `beside` it, there is text.

    A path at which there is nothing is text as well.
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
    # Not above: a talk without files has no need of it.
    from dragoman.client import BadFile, audio, image

    try:
        if file.stat().st_size > LARGEST_FILE:
            raise CommandError(f"{file} is larger than {LARGEST_FILE >> 20} MiB.", "Make it smaller first.")
        return audio(file) if file.suffix.lower() in SOUNDS else image(file)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.") from error
    except BadFile as error:
        raise CommandError(str(error)) from None
