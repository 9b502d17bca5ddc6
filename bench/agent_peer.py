"""What vLLM does with a turn before its engine sees it, in an interpreter that has vLLM.

Its own reading of the body, then what its renderer calls: `apply_chat_template` and the tokenizer of
`transformers`, which SGLang calls as well. It starts once, because that takes longer than all that is
measured; it is told a folder in a line, and says the milliseconds of processor time of each turn in one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench import vllm_peers
from bench.agent_loop import Loop, make_loop
from bench.errors import BenchError
from bench.process import LOGS, ROOT


class Peer:
    """`with Peer(128, 130, [10, 128]) as peer: peer.measure(folder)` gives what both turns cost."""

    def __init__(self, turns: int, words: int, asked: Sequence[int]) -> None:
        self._command = [vllm_peers.python(), "-m", "bench.agent_peer", *map(str, (turns, words, *asked))]

    def __enter__(self) -> "Peer":
        LOGS.mkdir(parents=True, exist_ok=True)
        quiet = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
        self._log = (LOGS / "agent-vllm.log").open("wb")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=quiet, stdin=pipe, stdout=pipe, stderr=self._log, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._log.close()

    def measure(self, folder: Path) -> list[float]:
        """Empty where the template cannot be rendered there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(folder, file=self._process.stdin, flush=True)
        # Others may write into the same place.
        while line := self._process.stdout.readline():
            if line.startswith("["):
                costs: list[float] = json.loads(line)
                return costs
        raise BenchError(f"vLLM's interpreter has ended; its words are in {self._log.name}.")


def answer(loop: Loop, asked: Sequence[int]) -> None:
    for line in sys.stdin:
        try:
            costs = _measure(Path(line.strip()), loop, asked)
        except Exception as error:
            print(f"{line.strip()}: {error!r}", file=sys.stderr, flush=True)
            costs = []
        print(json.dumps(costs), flush=True)


def _measure(folder: Path, loop: Loop, asked: Sequence[int]) -> list[float]:
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer = AutoTokenizer.from_pretrained(folder)
    costs: list[float] = []
    # The first is asked twice: what is made once is made for it.
    for turn in (asked[0], *asked):
        body = loop.body(turn, "agent")
        began = time.process_time()
        request = ChatCompletionRequest.model_validate_json(body)
        messages = [_as_given(message) for message in request.messages]
        tools = [tool.model_dump() for tool in request.tools or ()]
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        tokenizer.encode(text, add_special_tokens=False)
        costs.append((time.process_time() - began) * 1000)
    return costs[1:]


def _as_given(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments as objects, as vLLM's own parsing of messages makes them."""
    fields = dict(message)
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [dict(call) for call in calls]
        for call in fields["tool_calls"]:
            function = dict(call["function"])
            call["function"] = function | {"arguments": json.loads(function["arguments"])}
    return fields


if __name__ == "__main__":
    turns, words, *asked = map(int, sys.argv[1:])
    answer(make_loop(turns, words), asked)
