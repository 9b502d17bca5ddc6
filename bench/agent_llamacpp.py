"""What llama.cpp's own server does with a turn before its model sees it.

The server has a model of one layer with the same vocabulary and the template, and room for a few hundred
tokens. So it reads a turn, renders its template, makes the grammar of its tools, encodes it all, and then
says that there is no room: that is everything but the model, and nothing of the answer.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import httpx

from bench import shapes
from bench.agent_loop import Loop, control_tokens
from bench.errors import BenchError
from bench.process import Server
from dragoman.engines.default_weights import default_model

SHAPE = shapes.Shape(1, 32, 32, 1, 1, tied=True)
CONTROL = 3
"""The kind of a control token in a GGUF file."""
ROOM = ["--slots", "1", "--context", "512", "--threads", "1"]
_NO_ROOM = re.compile(r'"n_prompt_tokens":\s*(\d+)')

_vocabulary = cache(shapes.read_vocabulary)


def make_model(template: str, folder: Path) -> Path:
    """With the vocabulary of the default model, and the control tokens that the template writes."""
    fields = {name: (value, kinds) for name, value, kinds in _vocabulary(default_model())}
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"][0] for name in ("tokens", "token_type"))
    new = sorted(control_tokens(template) - {*tokens})
    changed = {
        "tokenizer.ggml.tokens": [*tokens, *new],
        "tokenizer.ggml.token_type": [*kinds, *[CONTROL] * len(new)],
        "tokenizer.chat_template": template,
    }
    file = folder / "agent.gguf"
    items = [(name, changed.get(name, value), types) for name, (value, types) in fields.items()]
    shapes.write(file, SHAPE, "Q8_0", items)
    return file


def measure(template: str, folder: Path, loop: Loop, turns: Sequence[int]) -> list[float]:
    """Milliseconds of the server's processor time for each of the turns."""
    costs = []
    with Server(
        "agent-llamacpp", ["bench.servers.llamacpp", str(make_model(template, folder)), *ROOM]
    ) as server:
        # The first is asked twice: what is made once is made for it.
        for turn in (turns[0], *turns):
            body, before = loop.body(turn, server.model), server.cpu_s()
            reply = httpx.post(
                f"http://127.0.0.1:{server.port}/v1/chat/completions", content=body, timeout=60
            )
            costs.append((server.cpu_s() - before) * 1000)
            if not _NO_ROOM.search(reply.text):
                raise BenchError(f"llama.cpp's server takes no such turn: {reply.text[:200]}")
    return costs[1:]
