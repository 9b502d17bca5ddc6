"""Images and audio for upstreams. No server takes them beside ids, so such jobs are sent as the
conversation that their prompt was rendered from, and the upstream renders it itself.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from dragoman.client import AsyncClient, ClientError
from dragoman.client.request import Request, chat
from dragoman.errors import FINAL_MESSAGE, TOOLS, BadRequest, EngineFailed
from dragoman.media import Media, MediaKind
from dragoman.media.headers import data_url
from dragoman.types import Conversation, Job, Message

_SENSES: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}
"""llama-server's names of the modalities."""


async def find_modalities(client: AsyncClient, model: Mapping[str, Any]) -> frozenset[MediaKind]:
    """Return the modalities of an upstream's model, from its list of models or llama-server's properties."""
    value: Any = model.get("modalities")
    if value is None and isinstance(model.get("architecture"), dict):
        value = model["architecture"].get("input_modalities")
    if value is None:
        try:
            props = (await client.request("GET", "/props")).body
        except ClientError:
            return frozenset()
        senses = props.get("modalities") if isinstance(props, dict) else None
        value = [_SENSES[name] for name in _SENSES if isinstance(senses, dict) and senses.get(name) is True]
    kinds: Iterable[MediaKind] = get_args(MediaKind)
    return frozenset(kind for kind in kinds if isinstance(value, list) and kind in value)


def chat_request(job: Job, fields: Mapping[str, Any], *, gives_ids: bool) -> Request:
    """Convert the fields of completions to those of chat, where they differ."""
    conversation = job.conversation
    if conversation is None:
        raise EngineFailed("A job with media has no conversation.")
    if conversation.tools and not gives_ids:
        # Its calls would be parsed already, and the model's own text would be unknown.
        message = "This upstream returns no token ids: with images or audio it does not support tools."
        raise BadRequest(message, param=TOOLS, code="unsupported_field")
    asked = dict(fields)
    if (top := asked.pop("logprobs", None)) is not None:
        asked |= {"logprobs": True, "top_logprobs": top}
    if gives_ids:
        # Both kinds of servers that return ids have these fields.
        asked |= {"chat_template_kwargs": dict(conversation.template_kwargs) or None}
        if conversation.continue_final_message:
            asked |= {"continue_final_message": True, "add_generation_prompt": False}
    elif conversation.continue_final_message:
        message = "This upstream cannot continue a message that has images or audio."
        raise BadRequest(message, param=FINAL_MESSAGE, code="unsupported_field")
    messages = [_write_message(message, conversation) for message in conversation.messages]
    return chat(messages, asked | {"tools": list(conversation.tools) or None})


def _write_message(message: Message, conversation: Conversation) -> dict[str, Any]:
    content = message.content
    fields: dict[str, Any] = {"role": message.role}
    fields["content"] = (
        content if not isinstance(content, list) else [_write_part(one, conversation) for one in content]
    )
    if message.name is not None:
        fields["name"] = message.name
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _write_part(part: dict[str, Any], conversation: Conversation) -> dict[str, Any]:
    if "media" not in part:
        return part
    media: Media = conversation.media[part["media"]]
    if media.kind == "audio":
        data = b64encode(media.data).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": media.format}}
    image = {"url": data_url(media)}
    if media.detail != "auto":
        image["detail"] = media.detail
    return {"type": "image_url", "image_url": image}
