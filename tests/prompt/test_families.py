"""A conversation in OpenAI's shape, through the prompter, is what transformers makes of it by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.prompt import PromptBuilder
from dragoman.types import Conversation, Message, ToolCall
from tests.prompt.support import SHARED, TEMPLATES, ByteTokenizer, clock

# One of ours loses text that is not given in parts, when it is rendered by hand.
OWN = sorted(path for path in TEMPLATES.glob("*.jinja") if path.stem != "parts_only")
PATHS = [*OWN, *sorted((SHARED / "templates").glob("*.jinja"))]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
        },
    },
}
ARGUMENTS = '{"city": "Paris", "days": 2}'
ASK, REPLY = Message(role="user", content="Rain?"), Message(role="assistant", content="No.")
CALL = ToolCall(id="abc123def", name="get_weather", arguments=ARGUMENTS)
RESULT = Message(role="tool", content="12 °C", tool_call_id="abc123def", name="get_weather")

CONVERSATIONS = {
    "plain": Conversation(messages=(ASK,)),
    "system": Conversation(messages=(Message(role="system", content="Be brief."), ASK)),
    "turns": Conversation(messages=(ASK, REPLY, ASK), add_generation_prompt=False),
    "tools": Conversation(messages=(ASK,), tools=(TOOL,)),
    "call": Conversation(
        messages=(ASK, Message(role="assistant", tool_calls=(CALL,)), RESULT), tools=(TOOL,)
    ),
    "reasoned call": Conversation(
        messages=(ASK, Message(role="assistant", tool_calls=(CALL,), reasoning="Hm."), RESULT), tools=(TOOL,)
    ),
    "called before": Conversation(
        messages=(ASK, Message(role="assistant", tool_calls=(CALL,)), RESULT, REPLY, ASK), tools=(TOOL,)
    ),
}


def by_hand(message: Message, arguments: Any, empty: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "role": message.role,
        "content": empty if message.content is None else message.content,
    }
    if message.tool_calls:
        function = {"name": "get_weather", "arguments": arguments}
        fields["tool_calls"] = [{"id": "abc123def", "type": "function", "function": function}]
    if message.reasoning:
        fields |= {"reasoning_content": message.reasoning}
    if message.role == "tool":
        fields |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields


def accepted(utils: Any, source: str, ask: Conversation) -> list[str]:
    """What transformers writes, for each shape of the call that the template can bear."""
    items = []
    for arguments in (json.loads(ARGUMENTS), ARGUMENTS):
        for empty in (None, ""):
            try:
                rendered, _ = utils.render_jinja_template(
                    conversations=[[by_hand(message, arguments, empty) for message in ask.messages]],
                    chat_template=source,
                    tools=list(ask.tools) or None,
                    add_generation_prompt=ask.add_generation_prompt,
                    bos_token="<s>",
                    eos_token="</s>",
                )
            except Exception:
                continue
            items.append(rendered[0])
    return items


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_equal_to_transformers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(utils, "datetime", type("Fixed", (), {"now": staticmethod(clock)}))
    source = path.read_text()
    card = ModelCard(name="m", max_model_len=9, templates={"default": source})
    builder = PromptBuilder(card, ByteTokenizer(special=("<s>", "</s>")), clock=clock)
    for name, ask in CONVERSATIONS.items():
        wanted = accepted(utils, source, ask)
        if wanted:
            text = builder.text(ask)
            assert text in wanted, name
            assert "None" not in text.replace("= None", ""), name
