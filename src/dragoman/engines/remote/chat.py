"""Pictures and sounds at upstreams: no server takes them beside ids, so such jobs go as the conversation that
their prompts were made of, which the upstream makes a prompt of itself."""

from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from dragoman.client import AsyncClient, ClientError
from dragoman.client.request import Request, chat
from dragoman.engines.protocol import Tokenizer
from dragoman.errors import FINAL_MESSAGE, TOOLS, BadRequest, EngineFailed
from dragoman.media import Media, MediaKind
from dragoman.media.read import MEDIA_TYPES
from dragoman.types import Conversation, Job, Message

_PLACEHOLDERS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("<|image_pad|>", "<image>", "[IMG]", "<image_soft_token>", "<|image|>", "<IMG_CONTEXT>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>", "<audio>", "[AUDIO]", "<audio_soft_token>", "<|audio|>"),
}
_SENSES: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}
"""What llama-server calls them."""


async def find_modalities(client: AsyncClient, model: Mapping[str, Any]) -> frozenset[MediaKind]:
    """What an upstream says that its model takes: in its list of models, or where llama-server says it."""
    told: Any = model.get("modalities")
    if told is None and isinstance(model.get("architecture"), dict):
        told = model["architecture"].get("input_modalities")
    if told is None:
        try:
            props = (await client.request("GET", "/props")).body
        except ClientError:
            return frozenset()
        senses = props.get("modalities") if isinstance(props, dict) else None
        told = [_SENSES[name] for name in _SENSES if isinstance(senses, dict) and senses.get(name) is True]
    kinds: Iterable[MediaKind] = get_args(MediaKind)
    return frozenset(kind for kind in kinds if isinstance(told, list) and kind in told)


def place_id(tokenizer: Tokenizer, kind: MediaKind) -> int:
    """One id for the whole: how many there are, only the upstream knows."""
    known = tokenizer.special
    return next((known[text] for text in _PLACEHOLDERS[kind] if text in known), tokenizer.eos_id or 0)


def chat_request(job: Job, fields: Mapping[str, Any], *, gives_ids: bool) -> Request:
    """The fields are those of completions; those that chat has otherwise are changed."""
    told = job.conversation
    if told is None:
        raise EngineFailed("A job with media came without its conversation.")
    if told.tools and not gives_ids:
        # Its calls would come as calls, and nobody could say what the model wrote.
        message = "This upstream gives text and no ids: with pictures or sounds it takes no tools."
        raise BadRequest(message, param=TOOLS, code="unsupported_field")
    asked = dict(fields)
    if (top := asked.pop("logprobs", None)) is not None:
        asked |= {"logprobs": True, "top_logprobs": top}
    if gives_ids:
        # Servers of both kinds that give ids have these.
        asked |= {"chat_template_kwargs": dict(told.template_kwargs) or None}
        if told.continue_final_message:
            asked |= {"continue_final_message": True, "add_generation_prompt": False}
    elif told.continue_final_message:
        message = "This upstream takes no message to go on with where there are pictures or sounds."
        raise BadRequest(message, param=FINAL_MESSAGE, code="unsupported_field")
    messages = [_write_message(message, told) for message in told.messages]
    return chat(messages, asked | {"tools": list(told.tools) or None})


def _write_message(message: Message, told: Conversation) -> dict[str, Any]:
    content = message.content
    made: dict[str, Any] = {"role": message.role}
    made["content"] = (
        content if not isinstance(content, list) else [_write_part(one, told) for one in content]
    )
    if message.name is not None:
        made["name"] = message.name
    if message.reasoning is not None:
        made["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return made


def _write_part(part: dict[str, Any], told: Conversation) -> dict[str, Any]:
    if "media" not in part:
        return part
    media: Media = told.media[part["media"]]
    data = b64encode(media.data).decode()
    if media.kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": media.format}}
    url = {"url": f"data:{MEDIA_TYPES[media.format]};base64,{data}"}
    return {
        "type": "image_url",
        "image_url": url if media.detail == "auto" else url | {"detail": media.detail},
    }
