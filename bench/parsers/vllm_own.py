"""vLLM's own streaming parsers, for `python -m bench.parse`; runs in an environment that has vLLM."""

import os
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from bench.parsers.loop import Delta, ParseResult, Task, serve


class Vocabulary:
    """What the parsers ask of a tokenizer."""

    all_special_tokens: tuple[str, ...] = ()
    """None: the parsers know their markers by the vocabulary, and drop special tokens that are not theirs."""
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        self._texts = {id_: text for text, id_ in ids.items()}
        self.vocab = ids

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: int | list[int], **_: Any) -> str:
        return "".join(self._texts.get(id_, "") for id_ in ([ids] if isinstance(ids, int) else ids))

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids[text]] if text in self._ids else []

    def tokenize(self, text: str, **_: Any) -> list[str]:
        return [text] if text in self._ids else list(text)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._ids.get(token)


class ParseRun:
    def __init__(self, task: Task, deltas: list[Delta]) -> None:
        tokenizer = Vocabulary(task.vocabulary)
        request: Any = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "x"}], tools=task.tools, tool_choice="auto"
        )
        if task.mode == "reasoning":
            self._parser = ReasoningParserManager.get_reasoning_parser(task.parser)(tokenizer)
            self._read, self._further = self._parser.extract_reasoning_streaming, {}
        else:
            self._parser = ToolParserManager.get_tool_parser(task.parser)(tokenizer, request.tools)
            self._read, self._further = self._parser.extract_tool_calls_streaming, {"request": request}
        # The end of the turn is a token without text, and some of the parsers close a call only then.
        self._steps = _cumulative([*deltas, ([len(task.vocabulary)], "")])
        self._said: list[Any] = []

    def run(self) -> None:
        read, keep, further = self._read, self._said.append, self._further
        for step in self._steps:
            keep(read(*step, **further))
        if getattr(self._parser, "engine_based_streaming", False):
            keep(self._parser.finish_streaming())

    def told(self) -> ParseResult:
        text, reasoning = "", ""
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for delta in filter(None, self._said):
            text += delta.content or ""
            reasoning += delta.reasoning or ""
            for call in delta.tool_calls or ():
                function = call.function
                if function is not None:
                    names[call.index] = names.get(call.index) or function.name or ""
                    arguments[call.index] = arguments.get(call.index, "") + (function.arguments or "")
        last = self._said[len(self._steps) - 1]
        if last and last.tool_calls and hasattr(self._parser, "get_remaining_unstreamed_args"):
            # As its server does with the last delta.
            arguments[max(arguments)] += self._parser.get_remaining_unstreamed_args()
        return ParseResult(text, reasoning, [(names[index], arguments[index]) for index in sorted(names)])


def _cumulative(deltas: list[Delta]) -> list[tuple[str, str, str, list[int], list[int], list[int]]]:
    """Its parsers want to see all that came before, too. Putting that together is not measured."""
    steps = []
    text, ids = "", list[int]()
    for new_ids, new in deltas:
        steps.append((text, text + new, new, ids, ids + new_ids, new_ids))
        text, ids = text + new, ids + new_ids
    return steps


if __name__ == "__main__":
    serve(ParseRun)
