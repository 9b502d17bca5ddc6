"""What vLLM does with a turn before its engine sees it, in an interpreter that has vLLM.

Its own reading of the body, then what its renderer calls: `apply_chat_template` and the tokenizer of
`transformers`, which SGLang calls as well. Prints the milliseconds of processor time of each turn.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from bench.agent_loop import make_loop


def measure(folder: Path, turns: int, words: int) -> tuple[list[float], int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loop = make_loop(turns, words)
    costs: list[float] = []
    ids: list[int] = []
    for turn in range(1, turns + 1):
        body = loop.body(turn, "agent")
        began = time.process_time()
        asked = ChatCompletionRequest.model_validate_json(body)
        messages = [_as_given(message) for message in asked.messages]
        tools = [tool.model_dump() for tool in asked.tools or ()]
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        costs.append((time.process_time() - began) * 1000)
    return costs, len(ids)


def _as_given(message: dict[str, object]) -> dict[str, object]:
    """Arguments as objects, as vLLM's own parsing of messages makes them."""
    given = dict(message)
    if calls := given.get("tool_calls"):
        given["tool_calls"] = [dict(call) for call in calls]  # type: ignore[attr-defined]
        for call in given["tool_calls"]:  # type: ignore[attr-defined]
            function = dict(call["function"])
            call["function"] = function | {"arguments": json.loads(function["arguments"])}
    return given


if __name__ == "__main__":
    found, tokens = measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"costs": found, "tokens": tokens}))
