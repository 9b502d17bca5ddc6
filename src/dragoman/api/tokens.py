"""The routes that turn prompts into ids and back, without generating."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dragoman.api.chat.request import ChatRequest, check_conversation
from dragoman.api.chat.request import prompt as chat_prompt
from dragoman.api.error_spelling import OpenAIErrors
from dragoman.api.fields.shared import TokenId
from dragoman.api.read import Reader
from dragoman.errors import CONVERSATION, BadRequest
from dragoman.limits import Limits
from dragoman.types import Prompt, TextPrompt

ERRORS = OpenAIErrors({CONVERSATION: "messages"})


class TokenizeText(Struct, kw_only=True, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """Any chat request, as it would be sent for an answer."""

    return_token_strs: bool | None = None


class Detokenize(Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


class _Shape(Struct):
    messages: Any = None
    prompt_token_ids: Any = None
    input_ids: Any = None


_shape = Reader.of(_Shape)
_text = Reader.of(TokenizeText)
_chat = Reader.of(TokenizeChat)
_ids = Reader.of(Detokenize)


def read_tokenize(body: bytes, limits: Limits) -> TokenizeText | TokenizeChat:
    if _shape.read(body) == _Shape():
        text: TokenizeText = _text.read(body)
        return text
    chat: TokenizeChat = _chat.read(body)
    check_conversation(chat, limits)
    return chat


def prompt(request: TokenizeText | TokenizeChat) -> Prompt:
    if isinstance(request, TokenizeText):
        return TextPrompt(request.prompt, None, request.add_special_tokens is not False)
    return chat_prompt(request)


def tokenized(ids: Sequence[int], max_model_len: int, names: Sequence[str] | None) -> dict[str, Any]:
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names}


def read_detokenize(body: bytes, vocabulary: int) -> Detokenize:
    request: Detokenize = _ids.read(body)
    highest = max(request.tokens, default=0)
    if highest >= vocabulary:
        message = f"Token id {highest} is outside of the vocabulary (0 to {vocabulary - 1})."
        raise BadRequest(message, param="tokens", code="invalid_token_id")
    return request
