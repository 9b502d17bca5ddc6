"""dragoman around an engine that plays the model of an agent's loop: it says what the loop has it say."""

import argparse
import re
from collections.abc import AsyncIterator
from pathlib import Path

from bench.agent_loop import Loop, make_loop
from bench.servers.scripted import UncancellableHandle
from dragoman.dialects.declarations import Dialect, starts_in_reasoning
from dragoman.dialects.render import render
from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.steps import iterate
from dragoman.http.server import serve
from dragoman.prompt.encode import PromptEncoder
from dragoman.prompt.find import find_dialect
from dragoman.settings import Settings
from dragoman.types import Answer, Job, Sink, Step, ToolCall

_MARKERS = re.compile(r"(?:<[^<>]*>\w*|\[[A-Z_]+\])*")
LAST = 64
"""Ids of a prompt that say whether it has opened reasoning."""
UNUSUAL = 8
"""Characters at the beginning of an answer that are an id each: no encoder would choose these."""


class AgentEngine:
    """Turn by turn, and then from the beginning again. Each answer is one step."""

    def __init__(self, folder: Path, loop: Loop, turns: int) -> None:
        self.tokenizer = HfTokenizer(str(folder))
        self.card = card_of(self.tokenizer, name="agent", max_model_len=1 << 20)
        self.prompts: list[int] = []
        """How many ids each prompt had."""
        source = self.card.templates["default"]
        self._dialect = dialect = find_dialect(template=source, model="agent").dialect
        self._answers = [self._ids(loop, turn, dialect) for turn in range(1, turns + 1)]
        self._thought = self._think(dialect)

    def _ids(self, loop: Loop, turn: int, dialect: Dialect) -> list[int]:
        fields = loop.said(turn)
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in fields["tool_calls"]
        ]
        text = render(dialect, Answer(text=fields["content"], calls=calls if dialect.has_calls else []))
        encode, end = PromptEncoder(self.tokenizer).encode_special, min(self.tokenizer.end_ids)
        # A model samples a marker as the one id that it is.
        opening = _MARKERS.match(text)
        start = opening.end() if opening else 0
        first = [id_ for char in text[start : start + UNUSUAL] for id_ in self.tokenizer.encode(char)]
        ids = [*encode(text[:start]), *first, *encode(text[start + UNUSUAL :], begins=False)]
        return ids if ids[-1] in self.tokenizer.end_ids else [*ids, end]

    def _think(self, dialect: Dialect) -> list[int]:
        """What is said first where the prompt has opened reasoning."""
        close = dialect.reasoning.close[0] if dialect.reasoning else ""
        return PromptEncoder(self.tokenizer).encode_special(f"So be it.{close}")

    def submit(self, job: Job, sink: Sink) -> UncancellableHandle:
        answer = self._answers[len(self.prompts) % len(self._answers)]
        end = b"".join(self.tokenizer.pieces[id_] for id_ in job.prompt[-LAST:]).decode(errors="replace")
        if starts_in_reasoning(self._dialect, end):
            answer = self._thought + answer
        self.prompts.append(len(job.prompt))
        sink(Step(answer[:-1]))
        sink(Step(answer[-1:], finish="stop"))
        return UncancellableHandle()

    def generate(self, job: Job) -> AsyncIterator[Step]:
        return iterate(self, job)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a tokenizer with its chat template")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--words", type=int, default=200)
    args = parser.parse_args()
    engine = AgentEngine(args.folder, make_loop(args.turns, args.words), args.turns)
    serve(engine, Settings(port=args.port))
