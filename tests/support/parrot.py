"""A model that says what the last message says, so that a request can say what the answer is to be."""

import json
from collections.abc import Callable

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import END_ID, SPECIAL, Fault, Script, ScriptedEngine, say
from dragoman.types import Job

NAME = "parrot"
START_ID = 256 + SPECIAL.index("<|im_start|>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HANG, BREAK = "HANG", "BREAK"
"""Where a message has one of these, the model never goes on, or the engine fails."""
FAULTS: dict[str, Fault] = {HANG: "hang", BREAK: "exception"}


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def messages_of(job: Job) -> list[tuple[str, str]]:
    """The role and the text of every message that the model was shown; tools are in one of the system's."""
    items: list[tuple[str, str]] = []
    ids = list(job.prompt)
    while START_ID in ids:
        ids = ids[ids.index(START_ID) + 1 :]
        end = ids.index(END_ID) if END_ID in ids else len(ids)
        role, _, text = bytes(ids[:end]).decode().partition("\n")
        items.append((role, text))
    return items[:-1]


def repeated(job: Job) -> Script:
    role, text = messages_of(job)[-1]
    if role == "tool":
        return say(f"The tool says: {text}")
    for mark, fault in FAULTS.items():
        before, value, _ = text.partition(mark)
        if value:
            return say(text, fault=fault, fault_at=len(before.encode()))
    return say(text)


def parrot(
    *, context: int = 4096, interval: float = 0.0, answer: Callable[[Job], Script] = repeated
) -> ScriptedEngine:
    """It is trusted to keep to constraints, and never does."""
    card = ModelCard(name=NAME, max_model_len=context, templates={"default": TEMPLATE}, constrains=True)
    return ScriptedEngine(answer, card=card, interval=interval)
