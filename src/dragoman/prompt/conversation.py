"""A conversation as the variables of a chat template, in the shape that the template can bear.

For a model whose template has no place for tools they are put in words: it is told of them in a system
message, with the way to call one in the dialect that its answers are read in. Calls and results of the
history are written out in the same way: nothing a client sends is dropped.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.json import encode
from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.dialects.render import render
from dragoman.errors import CONVERSATION, FINAL_MESSAGE, TEMPLATE_KWARGS, BadRequest
from dragoman.json_amount import check_amount, outside_of_strings
from dragoman.limits import Limits, check_count
from dragoman.prompt.traits import Messages, TemplateTraits
from dragoman.types import Answer, Conversation, Message, ToolCall

MAX_KWARGS_DEPTH = 8

# fmt: off
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token",
    "cls_token", "mask_token", "additional_special_tokens", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs",
    "raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum",
    "self", "loop", "caller", "varargs", "kwargs",
})
# fmt: on


def template_variables(conversation: Conversation, traits: TemplateTraits) -> dict[str, Any]:
    """What `apply_chat_template` would give the template.

    `Conversation(messages=(Message(role="user", content="hi"),))` gives
    `{"messages": [{"role": "user", "content": "hi"}], "tools": None, ...}`.
    """
    if conversation.continue_final_message and conversation.add_generation_prompt:
        raise BadRequest(
            f"'{FINAL_MESSAGE}' and 'add_generation_prompt' cannot both be true.",
            param=FINAL_MESSAGE,
        )
    return {
        **conversation.template_kwargs,
        "messages": _place_systems(_messages(conversation.messages, traits), traits),
        "tools": list(conversation.tools) or ([] if traits.empty_tools else None),
        "documents": list(conversation.documents) or None,
        "add_generation_prompt": conversation.add_generation_prompt,
    }


def check_kwargs(kwargs: Mapping[str, Any], most: int) -> None:
    """Names that a template's own variables have are refused (CVE-2025-62426), and so is too much."""
    for name in kwargs:
        if name in RESERVED or name.startswith("_") or not name.isidentifier():
            raise BadRequest(
                f"'{TEMPLATE_KWARGS}' cannot set {name[:64]!r}.",
                param=TEMPLATE_KWARGS,
                code="invalid_value",
            )
    if kwargs:
        check_count(_size(kwargs, MAX_KWARGS_DEPTH), most, TEMPLATE_KWARGS, "characters of values")


def _size(value: Any, depth: int) -> int:
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, (bool, int, float)):
        return 8
    if depth == 0 or not isinstance(value, (Mapping, list, tuple)):
        raise BadRequest(
            f"'{TEMPLATE_KWARGS}' holds JSON values, at most {MAX_KWARGS_DEPTH} levels deep.",
            param=TEMPLATE_KWARGS,
            code="invalid_value",
        )
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return sum(_size(each, depth - 1) for each in inner)


def check_arguments(messages: Sequence[Message], limits: Limits) -> None:
    """The arguments of calls are JSON within the body's strings: together they are no more than a body."""
    texts = [call.arguments for message in messages for call in message.tool_calls]
    if sum(map(len, texts)) > limits.json_lists:
        bare = b",".join(outside_of_strings(text.encode("utf-8", "surrogatepass")) for text in texts)
        check_amount(bare, limits, "the calls' arguments", CONVERSATION)


def _messages(messages: Sequence[Message], traits: TemplateTraits) -> Messages:
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_message(message, traits, names) for message in messages]


def _message(message: Message, traits: TemplateTraits, names: Mapping[str | None, str]) -> dict[str, Any]:
    role = _role(message.role, traits)
    made: dict[str, Any] = {"role": role, "content": _content(message.content, role, traits)}
    name = message.name or (names.get(message.tool_call_id) if role == "tool" else None)
    if name is not None:
        made["name"] = name
    if message.reasoning is not None:
        made |= dict.fromkeys(traits.reasoning_keys, message.reasoning)
    if message.tool_calls:
        made["tool_calls"] = [_call(call, traits) for call in message.tool_calls]
        if traits.thinking_excludes_content and message.reasoning and message.content:
            # The template has one place for both; neither may be lost.
            joined = f"{message.reasoning}\n{_join_texts(message.content)}"
            made |= {"content": "", **dict.fromkeys(traits.reasoning_keys, joined)}
    if message.tool_call_id is not None:
        made["tool_call_id"] = _call_id(message.tool_call_id, traits)
    return made


def _role(role: str, traits: TemplateTraits) -> str:
    if role == "function":
        return "tool"
    return "system" if role == "developer" and not traits.developer else role


def _content(content: str | list[dict[str, Any]] | None, role: str, traits: TemplateTraits) -> Any:
    if content is None:
        return None if role == "assistant" and traits.null_content else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if role in traits.needs_parts else content
    return [_part(part) for part in content] if role in traits.takes_parts else _join_texts(content)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Chat, Responses and refusals name text differently; templates know one name."""
    text = _text(part)
    return part if text is None else {"type": "text", "text": text}


def _text(part: dict[str, Any]) -> str | None:
    if part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        return text if isinstance(text, str) else None
    if part.get("type") == "refusal":
        return str(part.get("refusal", ""))
    return None


def _join_texts(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(_texts(content))


def _texts(parts: list[dict[str, Any]]) -> Iterator[str]:
    for part in parts:
        text = _text(part)
        if text is None:
            raise BadRequest(
                f"This model takes text only, not parts of type {str(part.get('type'))[:64]!r}.",
                param=CONVERSATION,
            )
        yield text


def _call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    arguments: Any = call.arguments if traits.raw_arguments else _parse_arguments(call.arguments)
    made: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    if call.id is not None:
        made["id"] = _call_id(call.id, traits)
    return made


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """The object. What a model wrote that is none becomes one: templates go through its members."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}


def _call_id(id: str, traits: TemplateTraits) -> str:
    """`call_8f2` is `call_8f2`, except where the template wants nine letters or digits."""
    if not traits.short_ids or re.fullmatch(r"[a-zA-Z0-9]{9}", id):
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _place_systems(messages: Messages, traits: TemplateTraits) -> Messages:
    """System and developer messages where the template can take them: none is refused, none is dropped."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    if not systems or (traits.system and (traits.many_systems or systems == messages[:1])):
        return messages
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    if traits.system:
        role = "system" if any(message["role"] == "system" for message in systems) else "developer"
        return [_merge(role, systems, traits), *rest]
    first = next((index for index, message in enumerate(rest) if message["role"] == "user"), None)
    if first is None:
        return [_merge("user", systems, traits), *rest]
    rest[first] = rest[first] | _merge("user", [*systems, rest[first]], traits)
    return rest


def _merge(role: str, messages: Messages, traits: TemplateTraits) -> dict[str, Any]:
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return {"role": role, "content": _content("\n\n".join(contents), role, traits)}
    lists = [c if isinstance(c, list) else [{"type": "text", "text": c}] for c in contents]
    return {"role": role, "content": _content([part for parts in lists for part in parts], role, traits)}


# Tools in words

EXAMPLE = ToolCall(id="call00001", name="NAME", arguments='{"ARGUMENT": "VALUE"}')


def with_tools_in_words(
    conversation: Conversation, traits: TemplateTraits, dialect: Dialect | None
) -> Conversation:
    """The conversation as it is, unless it has tools and the template would not show them."""
    if traits.tools or not conversation.tools or dialect is None or not dialect.has_calls or dialect.own:
        return conversation
    messages = tuple(_written_out(message, traits, dialect) for message in conversation.messages)
    told = Message(role="system", content=_description(conversation, dialect))
    return replace(conversation, messages=(told, *messages), tools=())


def _description(conversation: Conversation, dialect: Dialect) -> str:
    functions = "\n".join(encode(tool.get("function", tool)).decode() for tool in conversation.tools)
    example = render(dialect, Answer(calls=[EXAMPLE]))
    return (
        f"You can call these functions; their parameters are JSON Schemas:\n{functions}\n\n"
        f"To call one, write exactly this, with the name and the arguments filled in:\n{example}"
    )


def _written_out(message: Message, traits: TemplateTraits, dialect: Dialect) -> Message:
    if message.tool_calls and not traits.calls and isinstance(message.content, str | None):
        answer = Answer(text=message.content or "", calls=list(message.tool_calls))
        return replace(message, content=render(dialect, answer), tool_calls=())
    if message.role == "tool" and not traits.tool_role:
        name = f" of {message.name}" if message.name else ""
        content = message.content if isinstance(message.content, str) else encode(message.content).decode()
        return Message(role="user", content=f"Result{name}:\n{content}")
    return message
