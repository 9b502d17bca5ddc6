"""The parsers as a library: text or tokens in, events out, and the whole answer as their fold."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.dialects.compiled import compile_dialect
from dragoman.dialects.declare import Dialect
from dragoman.dialects.machine import Machine
from dragoman.dialects.reader import Reader
from dragoman.dialects.registry import get_dialect, own_dialect
from dragoman.dialects.schema import Tools
from dragoman.folding import Fold
from dragoman.types import Answer, Event

PIECE = 64 * 1024


class Parser:
    """Reads one answer as it comes.

    `feed("text")`, or `feed([(id, "text"), ...])` with the ids of the tokens: then a marker that is one of
    `special_tokens` is recognised by its id alone, and its spelling in ordinary text is text.
    `dialect` is a name, a Dialect, or a model's own `response_template`, which alone asks for the `prompt`.
    """

    def __init__(
        self,
        dialect: str | Dialect | Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_reasoning: bool = False,
        *,
        calls: bool = True,
        reasoning: bool = True,
        json_answer: bool = False,
        special_tokens: Mapping[int, str] | None = None,
        prompt: str = "",
    ) -> None:
        self.dialect = _declared(dialect)
        self._special = dict(special_tokens or {})
        self._sentinels: Mapping[str, str] = {}
        self._reader: Reader
        if self.dialect.own is not None:
            self._reader = self.dialect.own.reader(prompt, tools)
            self._sentinels = {token: token for token in self._special.values()}
            return
        compiled = compile_dialect(
            self.dialect,
            frozenset(self._special.values()),
            calls=calls,
            reasoning=reasoning,
            json_answer=json_answer,
        )
        self._sentinels = compiled.sentinels
        self._reader = Machine(compiled, Tools(tools), starts_in_reasoning=starts_in_reasoning and reasoning)

    def feed(self, text: str | Sequence[tuple[int, str]]) -> list[Event]:
        if not isinstance(text, str):
            text = "".join([self._token(id_, piece) for id_, piece in text])
        return self._reader.feed(text) if text else []

    def _token(self, id_: int, piece: str) -> str:
        """A special token is its private character if it is a marker, and nothing if it is none."""
        special = self._special.get(id_)
        return piece if special is None else self._sentinels.get(special, "")

    def finish(self) -> list[Event]:
        return self._reader.finish()


def _declared(dialect: str | Dialect | Mapping[str, Any]) -> Dialect:
    if isinstance(dialect, Dialect):
        return dialect
    return get_dialect(dialect) if isinstance(dialect, str) else own_dialect(dialect)


def parse(
    text: str,
    dialect: str | Dialect | Mapping[str, Any] = "hermes",
    tools: Sequence[Mapping[str, Any]] = (),
    starts_in_reasoning: bool = False,
    *,
    calls: bool = True,
    reasoning: bool = True,
    json_answer: bool = False,
) -> Answer:
    """`parse('<tool_call>{"name": "f", "arguments": {}}</tool_call>').calls[0].name` is "f"."""
    parser = Parser(
        dialect, tools, starts_in_reasoning, calls=calls, reasoning=reasoning, json_answer=json_answer
    )
    folded = Fold()
    # In pieces, so that there are never many events, and no search through all of it at once.
    for at in range(0, len(text), PIECE):
        folded.add(parser.feed(text[at : at + PIECE]))
    folded.add(parser.finish())
    return folded.done()[0]


def starts_in_reasoning(dialect: Dialect, prompt: str, *, continues: bool = False) -> bool:
    """Whether the rendered prompt leaves the answer inside of reasoning.

    What counts is the end of the prompt, not its middle, where a message may quote a marker. Where the prompt
    `continues` an answer that was begun, it is the last marker in it.
    """
    thinking = dialect.reasoning
    if thinking is None:
        return False
    opens, closes = ([spelling.strip() for spelling in group] for group in (thinking.open, thinking.close))
    if not continues:
        return prompt.rstrip().endswith(tuple(opens))
    return max(map(prompt.rfind, opens)) > max(map(prompt.rfind, closes))
