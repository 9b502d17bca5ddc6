"""The messages of a chat request: what is checked in them, and what of them reaches the template."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.json import encode as encode_json

from dragoman.api.fields.shared import Natural, ShortText
from dragoman.api.tools import as_arguments
from dragoman.errors import BadRequest
from dragoman.types import Message, Role, ToolCall

MEDIA_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}


class FunctionCall(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(Struct, forbid_unknown_fields=True):
    name: str
    input: str


class MessageToolCall(Struct, forbid_unknown_fields=True):
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    index: Natural | None = None

    @property
    def called(self) -> FunctionCall | None:
        """The call as the prompt knows it."""
        if self.custom is None or self.function is not None:
            return self.function
        return FunctionCall(self.custom.name, as_arguments(self.custom.input))


class MessageBody(Struct, forbid_unknown_fields=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: ShortText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: ShortText | None = None
    # What servers and clients leave in messages they send back; none of it is part of a prompt.
    id: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    provider_specific_fields: Any = None


def check_messages(messages: Sequence[MessageBody]) -> None:
    """Raises where a part or a call cannot be used."""
    for number, message in enumerate(messages):
        if isinstance(message.content, list):
            for at, part in enumerate(message.content):
                part_text(part, f"messages[{number}].content[{at}]")
        if message.tool_calls or message.function_call:
            # Arguments may be anything: a model may have written them wrong, or been cut short.
            _check_calls(message, f"messages[{number}]")


def _check_calls(message: MessageBody, place: str) -> None:
    for number, call in enumerate(message.tool_calls or ()):
        if call.called is None:
            name = f"{place}.tool_calls[{number}].function"
            raise BadRequest(f"'{name}' is required.", param=name, code="missing_field")


def part_text(part: dict[str, Any], param: str) -> str:
    kind = part.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"'{param}.type' must be a string.", param=f"{param}.type", code="invalid_value")
    # Beside a text, too, an image is not left out in silence.
    media = (
        kind if kind in MEDIA_PARTS else next((key for key in part if key in MEDIA_PARTS and part[key]), "")
    )
    if media:
        message = f"This model takes text only; {MEDIA_PARTS[media]} are not supported."
        raise BadRequest(message, param=param, code="unsupported_content")
    key = "refusal" if kind == "refusal" else "text"
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise BadRequest(
            f"Unknown content part type {kind[:64]!r}.", param=f"{param}.type", code="invalid_value"
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise BadRequest(f"'{param}.{key}' must be a string.", param=f"{param}.{key}", code="invalid_value")
    return text


def to_message(body: MessageBody) -> Message:
    """The template's view: everything that does not belong into a prompt is gone."""
    return Message(
        role=body.role,
        content=_parts(body.content) if isinstance(body.content, list) else body.content,
        name=body.name,
        reasoning=body.reasoning_content or body.reasoning or body.thinking,
        tool_calls=tuple(_tool_calls(body)),
        tool_call_id=body.tool_call_id,
    )


def _parts(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part_text(part, "content")} for part in content]


def joined(content: str | list[dict[str, Any]] | None) -> str:
    return "".join(p["text"] for p in _parts(content)) if isinstance(content, list) else content or ""


def _tool_calls(body: MessageBody) -> list[ToolCall]:
    calls = [_tool_call(call.id, call.called) for call in body.tool_calls or () if call.called]
    if body.function_call:
        calls.append(_tool_call(None, body.function_call))
    return calls


def _tool_call(id_: str | None, function: FunctionCall) -> ToolCall:
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = encode_json(arguments).decode()
    return ToolCall(id=id_, name=function.name, arguments=arguments or "{}")
