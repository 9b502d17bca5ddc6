"""dragoman's parsers, for `python -m bench.parse`."""

from bench.parsers.loop import Delta, ParseResult, Task, serve
from dragoman.dialects.parser import Parser
from dragoman.types import Event, fold


class ParseRun:
    def __init__(self, task: Task, deltas: list[Delta]) -> None:
        self._parser = Parser(task.parser, task.tools)
        self._texts = [text for _, text in deltas]
        self._events: list[list[Event]] = []

    def run(self) -> None:
        feed, keep = self._parser.feed, self._events.append
        for text in self._texts:
            keep(feed(text))
        keep(self._parser.finish())

    def told(self) -> ParseResult:
        answer = fold([event for events in self._events for event in events])
        calls = [(call.name, call.arguments) for call in answer.calls]
        return ParseResult(answer.text, answer.reasoning, calls)


if __name__ == "__main__":
    serve(ParseRun)
