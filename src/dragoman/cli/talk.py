"""One conversation in a terminal: questions in, answers printed as they come, a history between them."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from msgspec import Struct

from dragoman.cli.problems import report
from dragoman.cli.terminal import visible
from dragoman.client import Client, Finished, Reasoning, StreamEvent, Text, Used
from dragoman.errors import DragomanError
from dragoman.logs import Paint
from dragoman.types import Usage

HELP = """\
/system TEXT  say how the model should behave; without TEXT, show it
/reset        forget the conversation
/history      show the conversation
/help         this
/quit         leave (or Ctrl-D)
Ctrl-C stops an answer."""


class PrintedAnswer(Struct):
    text: str = ""
    usage: Usage | None = None
    finish: str | None = None
    seconds: float = 0.0
    first_s: float | None = None
    stopped: bool = False


class Talk:
    """`Talk(client, {"model": "m"}).ask("hi")` prints the answer and remembers both."""

    def __init__(
        self, client: Client, fields: Mapping[str, Any], system: str | None = None, out: TextIO | None = None
    ) -> None:
        self.client, self.fields, self.system = client, dict(fields), system
        self.history: list[dict[str, str]] = []
        self._out = sys.stdout if out is None else out
        self._paint = Paint(self._out)

    def ask(self, question: str) -> PrintedAnswer:
        """Print the answer as it comes. A failure leaves the history as it was."""
        said = [*self.history, {"role": "user", "content": question}]
        start = [{"role": "system", "content": self.system}] if self.system else []
        answer = self._listen(start + said)
        if answer.text:
            self.history = [*said, {"role": "assistant", "content": answer.text}]
        return answer

    def _listen(self, messages: list[dict[str, str]]) -> PrintedAnswer:
        answer, start = PrintedAnswer(), time.perf_counter()
        stream = self.client.chat(messages, **self.fields)
        try:
            for event in stream:
                if answer.first_s is None and isinstance(event, Text | Reasoning):
                    answer.first_s = time.perf_counter() - start
                self._hear(event, answer)
        except KeyboardInterrupt:
            answer.stopped = True
        finally:
            # Hangs up, which is what makes the engine stop.
            stream.close()
            answer.seconds = time.perf_counter() - start
        return answer

    def _hear(self, event: StreamEvent, answer: PrintedAnswer) -> None:
        match event:
            case Text():
                # Kept before it is shown: Ctrl-C may come in between, and what was seen was said.
                answer.text += event.text
                self._write(event.text)
            case Reasoning():
                self._write(event.text, "dim")
            case Finished():
                answer.finish = event.reason
            case Used():
                answer.usage = event.usage

    def _write(self, text: str, style: str | None = None) -> None:
        if text:
            # A pipe gets the model's own characters; a terminal would obey some of them.
            text = visible(text) if self._out.isatty() else text
            self._out.write(self._paint(style, text) if style else text)
            self._out.flush()

    def chat(self, read: Callable[[str], str] = input) -> int:
        """Read, ask, print until the person leaves."""
        interrupted = False
        while True:
            try:
                line = read(self._prompt()).strip()
                interrupted = False
            except EOFError:
                print(file=self._out)
                return 0
            except KeyboardInterrupt:
                print(file=self._out)
                if interrupted:
                    raise
                interrupted = True
                print(self._paint("dim", "Ctrl-C again, Ctrl-D or /quit to leave"), file=self._out)
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return 0
            elif line:
                self._turn(line)

    def _prompt(self) -> str:
        # The marks tell readline that what is between them takes no room on the screen.
        return "\001\x1b[36m\002› \001\x1b[0m\002" if self._paint.on else "> "

    def _turn(self, line: str) -> None:
        try:
            answer = self.ask(line)
        except DragomanError as error:
            report(error)
            return
        print(file=self._out)
        print(self._paint("dim", figures(answer)), file=self._out)

    def command(self, line: str) -> bool:
        """Obey a /command; False when it was the last one."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        actions: dict[str, Callable[[str], str]] = {
            "/system": self._say_system,
            "/reset": self._reset,
            "/history": self._show,
            "/help": lambda _: HELP,
        }
        action = actions.get(name)
        said = action(rest.strip()) if action else f"There is no command {name}; /help lists them."
        print(self._paint("dim", visible(said)), file=self._out)
        return True

    def _say_system(self, text: str) -> str:
        self.system = text or self.system
        return (
            f"system: {self.system}" if self.system else "There is no system prompt; /system TEXT sets one."
        )

    def _reset(self, _: str) -> str:
        self.history = []
        return "The conversation is forgotten."

    def _show(self, _: str) -> str:
        start = [{"role": "system", "content": self.system}] if self.system else []
        return (
            "\n".join(f"{m['role']}: {m['content']}" for m in start + self.history) or "Nothing was said yet."
        )


def figures(answer: PrintedAnswer) -> str:
    """`128 tok  118 tok/s  first 35 ms  length`"""
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
