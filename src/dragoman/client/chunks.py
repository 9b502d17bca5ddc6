"""The chunks of a chat or completions stream to events."""

from collections.abc import Iterator

from dragoman.client.calls import Calls
from dragoman.client.events import Finished, Reasoning, Refusal, StreamEvent, Text, Token, Unseen, Used
from dragoman.client.problems import FailedInside
from dragoman.client.tokens import entries_of, tokens_of
from dragoman.client.wire import CallDelta, Choice, Delta, problem_of, read_chunk


class ChunkReader:
    """`over` is true when every choice that has begun is finished: some servers leave out the end mark."""

    def __init__(self) -> None:
        self._calls: dict[int, Calls] = {}
        self._unfinished: set[int] = set()

    @property
    def over(self) -> bool:
        return bool(self._calls) and not self._unfinished

    def read(self, data: bytes) -> Iterator[StreamEvent]:
        chunk = read_chunk(data)
        if chunk.error is not None:
            raise FailedInside(problem_of(chunk.error))
        for choice in chunk.choices:
            yield from self._choice(choice)
        if chunk.usage is not None:
            yield Used(chunk.usage.usage())

    def _choice(self, choice: Choice) -> Iterator[StreamEvent]:
        number, said = choice.index, choice.said
        if number not in self._calls:
            self._calls[number] = Calls(number)
            self._unfinished.add(number)
        text = said.thought or said.content or said.refusal or ""
        tokens = tokens_of(choice.token_ids, entries_of(choice.logprobs), text)
        yield from self._pieces(number, said, tokens)
        if choice.finish_reason is not None:
            self._unfinished.discard(number)
            yield from self._calls[number].finish(choice.finish_reason)
            yield Finished(reason=choice.finish_reason, stop=choice.stop_reason, choice=number)

    def _pieces(self, number: int, said: Delta, tokens: list[Token]) -> Iterator[StreamEvent]:
        """The chunk's tokens go with the first of what it says: nearly always there is but one thing."""
        for kind, text in ((Reasoning, said.thought), (Text, said.content), (Refusal, said.refusal)):
            if text:
                yield kind(text, tokens, number)
                tokens = []
        calls = said.tool_calls or ([CallDelta(0, function=said.function_call)] if said.function_call else [])
        for place, call in enumerate(calls):
            if call.index is None and len(calls) > 1:
                call.index = place
            yield from self._calls[number].take(call, tokens)
            tokens = []
        if tokens:
            yield Unseen("", tokens, number)
