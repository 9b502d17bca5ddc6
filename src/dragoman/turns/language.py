"""The language that one model answers in: what its ids say, and how the text is to be read."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeAlias

from dragoman.dialects.compiled import CompiledDialect, compile_dialect
from dragoman.dialects.declare import Dialect
from dragoman.dialects.machine import Machine
from dragoman.dialects.parser import AnswerReader, PlainReader, starts_in_reasoning
from dragoman.dialects.schema import Tools
from dragoman.engines.protocol import Tokenizer
from dragoman.turns.custom_calls import CustomCalls
from dragoman.turns.detokenize import Pieces
from dragoman.turns.spec import Reading
from dragoman.types import Conversation

MakeReader: TypeAlias = Callable[[bool, Sequence[int]], AnswerReader]
"""The reader of one answer, told whether the prompt has opened reasoning, and the prompt."""
MOST_PROMPT_IDS = 4096
"""Of a prompt's end, which a response_template looks at."""


class Language:
    """Made once per model. Markers that are special tokens come as the private characters of the dialect."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer) -> None:
        self.dialect = dialect
        self.plain = Pieces(tokenizer.pieces, frozenset(tokenizer.special.values()))
        self._tables: dict[tuple[tuple[int, str], ...], Pieces] = {(): self.plain}
        special = frozenset(tokenizer.special)
        self._compiled = {
            (calls, reasoning): compile_dialect(dialect, special, calls=calls, reasoning=reasoning)
            for calls, reasoning in product((True, False), repeat=2)
        }
        self._pieces = {
            (calls, reasoning): self._mark(calls, made, tokenizer)
            for (calls, reasoning), made in self._compiled.items()
        }
        if dialect.own is not None:
            # Its patterns are written for text in which special tokens stand.
            shown = self.plain.marked({id_: token for token, id_ in tokenizer.special.items()})
            self._pieces = dict.fromkeys(self._pieces, shown)

    def _mark(self, calls: bool, compiled: CompiledDialect, tokenizer: Tokenizer) -> Pieces:
        marks = {tokenizer.special[token]: mark for token, mark in compiled.sentinels.items()}
        if not calls and self.dialect.channels is None:
            # The markers of calls are special tokens like any other then: skipped, or shown on demand.
            met = "".join([*compiled.text.meanings, *compiled.reasoning.meanings])
            marks = {id_: mark for id_, mark in marks.items() if mark in met}
        key = tuple(marks.items())
        if key not in self._tables:
            self._tables[key] = self.plain.marked(marks)
        return self._tables[key]

    def pieces(self, reading: Reading | None) -> Pieces:
        return self.plain if reading is None else self._pieces[reading.calls, reading.reasoning]

    def readers(self, reading: Reading | None) -> MakeReader:
        make = self._readers(reading)
        if reading is None or not reading.custom:
            return make
        names = reading.custom
        return lambda in_reasoning, prompt: CustomCalls(make(in_reasoning, prompt), names)

    def _readers(self, reading: Reading | None) -> MakeReader:
        if reading is None or self.dialect.name == "plain":
            return lambda in_reasoning, prompt: PlainReader()
        if self.dialect.own is not None:
            return lambda in_reasoning, prompt: self._own_reader(reading, prompt)
        compiled, tools = self._compiled[reading.calls, reading.reasoning], Tools(reading.tools)
        apart, verbatim = reading.reasoning, reading.verbatim
        return lambda in_reasoning, prompt: Machine(
            compiled, tools, starts_in_reasoning=in_reasoning and apart, verbatim=verbatim
        )

    def _own_reader(self, reading: Reading, prompt: Sequence[int]) -> AnswerReader:
        said = self.plain.text(prompt[-MOST_PROMPT_IDS:])
        reader: AnswerReader = self.dialect.own.reader(said, reading.tools)
        return reader


def opened_reasoning(dialect: Dialect, conversation: Conversation, prompt: str) -> bool:
    """Read off what the client began to write for the model, else off the template's last words.

    A prompt that ends with `<think>\\n` has opened it, one that ends with `<think>\\n\\n</think>` has not.
    What users write says nothing.
    """
    begun = _begun(conversation).rstrip()
    if starts_in_reasoning(dialect, begun, continues=True):
        return True
    closes = dialect.reasoning.close if dialect.reasoning else ()
    if any(close.strip() in begun for close in closes):
        return False
    return starts_in_reasoning(dialect, prompt.rstrip().removesuffix(begun))


def ids_opened_reasoning(dialect: Dialect, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """The same for a prompt of ids, which may end in the middle of an answer.

    An answer begins after a control token; what stands before the last of them says nothing. Without any but
    the first id of a text, nobody can tell where messages end: then only the end of the prompt counts.
    """
    thinking = dialect.reasoning
    if thinking is None:
        return False
    markers = {spelling.strip() for spelling in (*thinking.open, *thinking.close)}
    frame = {id_ for text, id_ in tokenizer.special.items() if text not in markers} - {tokenizer.bos_id}
    start = next((place for place in range(len(prompt), 0, -1) if prompt[place - 1] in frame), 0)
    text = b"".join(tokenizer.pieces[id_] for id_ in prompt[start:]).decode("utf-8", "replace")
    return starts_in_reasoning(dialect, text, continues=start > 0)


def _begun(conversation: Conversation) -> str:
    """The answer so far: a final message that is to be continued, and the prefix."""
    content = conversation.messages[-1].content if conversation.continue_final_message else ""
    if isinstance(content, list):
        content = content[-1].get("text", "") if content else ""
    return (content or "") + conversation.response_prefix
