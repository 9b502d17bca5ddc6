"""A scripted model that calls tools, for exact runs of a tool loop."""

import json
from collections.abc import Callable

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import Script, ScriptedEngine
from dragoman.types import Job

NAME = "scripted"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt_of(job: Job) -> str:
    """What the model was shown, without control tokens."""
    return bytes(id_ for id_ in job.prompt if id_ < 256).decode()


def tool_model(answer: Callable[[Job], Script], *, context: int = 4096) -> ScriptedEngine:
    # Scripts keep to what they are asked by themselves.
    card = ModelCard(name=NAME, max_model_len=context, templates={"default": TEMPLATE}, constrains=True)
    return ScriptedEngine(answer, card=card)
