"""An agent's loop as one conversation: a system prompt, tools of 20 KB, calls and what came of them.

The words are chosen at random from a seed, so that every server and every way is asked the very same.
"""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.errors import BenchError
from bench.process import ROOT
from dragoman.engines.scripted import CHATML

TOOL_BYTES = 20_000
SYLLABLES = (
    "an",
    "ber",
    "con",
    "di",
    "er",
    "fo",
    "gra",
    "in",
    "lo",
    "me",
    "no",
    "per",
    "qua",
    "re",
    "st",
    "ti",
)
ENDS = (".", ",", ":", ";\n", "()", '"', "\n\n", " = 0x7f", "{", "}\n")
TOOLS_SECTION = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
)
CALLS_SECTION = (
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
PLAIN = TOOLS_SECTION + CHATML.replace("{{ message.content }}", CALLS_SECTION)
"""ChatML with tools and calls, for those who have no folder of templates."""
_CONTROL = re.compile(
    r"<[|｜][^<>\s'\"{}]{1,40}[|｜]>|</?(?:start|end)_of_turn>|\[/?[A-Z][A-Z_]+\]|</?s>"
    r"|</?seed:\w+>|\]~!?b[\]\[]|\[e~\["
)
TOKENIZER = ROOT / "build" / "vllm_models" / "smollm2"


class Loop(Struct, frozen=True):
    """The whole conversation. Turn `n` is asked with the first messages, `upto(n)`."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    def upto(self, turn: int) -> list[dict[str, Any]]:
        """What a client sends for a turn; the first is 1."""
        return self.messages[: 2 * turn]

    def body(self, turn: int, model: str) -> bytes:
        asked = {"model": model, "messages": self.upto(turn), "tools": self.tools, "stream": True}
        return json.dumps(asked | {"stream_options": {"include_usage": True}}).encode()

    def said(self, turn: int) -> dict[str, Any]:
        """What the model says to it."""
        message: dict[str, Any] = self.messages[2 * turn]
        return message


def make_loop(turns: int, words: int, seed: int = 7) -> Loop:
    """`words` come with each turn, most of them in what the tool says."""
    choose = random.Random(seed)

    words_of = ["".join(choose.choices(SYLLABLES, k=choose.randint(1, 4))) for _ in range(4000)]

    def text(count: int) -> str:
        texts = choose.choices(words_of, k=count)
        for index in range(0, count, 7):
            texts[index] = f"{texts[index]}_{choose.randrange(1000)}{choose.choice(ENDS)}"
        return " ".join(texts)

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(60)},
        {"role": "user", "content": text(40)},
    ]
    for turn in range(turns):
        arguments = json.dumps({"path": f"/{text(1)}/{turn}", "note": text(words // 10)})
        function = {"name": f"tool_{turn % 8}", "arguments": arguments}
        call = {"id": f"call{turn:05d}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": text(words // 10), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text(words * 8 // 10)})
    return Loop(_tools(text), messages)


def _tools(text: Any) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    while len(json.dumps(tools)) < TOOL_BYTES:
        names = ("path", "note")
        properties = {name: {"type": "string", "description": text(30)} for name in names}
        parameters = {"type": "object", "properties": properties, "required": ["path"]}
        function = {"name": f"tool_{len(tools)}", "description": text(60), "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def templates(folder: Path | None, names: list[str]) -> Mapping[str, str]:
    """Those whose file names begin so, by the name without its end; ChatML where there is no folder."""
    if folder is None:
        return {"ChatML": PLAIN}
    fields = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
    chosen = {name: source for name, source in fields.items() if name.startswith(tuple(names))}
    if not chosen:
        raise BenchError(f"There is no template in {folder} whose name begins with {' or '.join(names)}.")
    return chosen


def control_tokens(template: str) -> set[str]:
    """Those that it writes."""
    return set(_CONTROL.findall(template))


def make_tokenizer(source: Path, template: str, folder: Path) -> Path:
    """A copy of a tokenizer with this template, and with the control tokens that the template writes."""
    definition = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = {token["content"] for token in definition["added_tokens"]}
    size = 1 + max([*definition["model"]["vocab"].values(), *(t["id"] for t in definition["added_tokens"])])
    new = sorted(control_tokens(template) - known - definition["model"]["vocab"].keys())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition["added_tokens"] += [
        {"id": size + number, "content": text, **flags} for number, text in enumerate(new)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
