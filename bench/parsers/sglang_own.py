"""SGLang's own streaming parsers, for `python -m bench.parse`; runs in an environment that has SGLang."""

from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from bench.parsers.loop import Delta, ParseResult, Task, serve


class ParseRun:
    def __init__(self, task: Task, deltas: list[Delta]) -> None:
        self._reasons = task.mode == "reasoning"
        self._parser: Any = (
            ReasoningParser(task.parser)
            if self._reasons
            else FunctionCallParser([Tool(**tool) for tool in task.tools], task.parser)
        )
        self._texts = [text for _, text in deltas]
        self._said: list[tuple[Any, Any]] = []

    def run(self) -> None:
        read, keep = self._parser.parse_stream_chunk, self._said.append
        for text in self._texts:
            keep(read(text))
        if not self._reasons:
            keep(self._parser.parse_stream_end())

    def told(self) -> ParseResult:
        if self._reasons:
            reasoning = "".join(result for result, _ in self._said if result)
            return ParseResult("".join(text for _, text in self._said if text), reasoning)
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for _, calls in self._said:
            for call in calls:
                names[call.tool_index] = names.get(call.tool_index) or call.name or ""
                arguments[call.tool_index] = arguments.get(call.tool_index, "") + (call.parameters or "")
        text = "".join(outcome for outcome, _ in self._said if outcome)
        return ParseResult(text, "", [(names[index], arguments[index]) for index in sorted(names)])


if __name__ == "__main__":
    serve(ParseRun)
