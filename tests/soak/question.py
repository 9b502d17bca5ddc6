"""What a person wants to know, and how each API spells it."""

from typing import Any, Literal, TypeAlias

from msgspec import Struct

Api: TypeAlias = Literal["chat", "completions", "responses", "messages", "ollama chat", "ollama generate"]
Ability: TypeAlias = Literal["history", "tools", "required", "schema", "count", "stop", "continue"]

PATHS: dict[Api, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama chat": "/api/chat",
    "ollama generate": "/api/generate",
}
ABILITIES: dict[Api, frozenset[Ability]] = {
    "chat": frozenset({"history", "tools", "required", "schema", "count", "stop"}),
    "completions": frozenset({"count", "stop"}),
    "responses": frozenset({"history", "tools", "required", "schema", "continue"}),
    "messages": frozenset({"history", "tools", "required", "schema", "stop"}),
    "ollama chat": frozenset({"history", "tools", "schema", "stop"}),
    "ollama generate": frozenset({"schema", "stop", "continue"}),
}
_TEXT = {"type": "string", "maxLength": 12}
_PLACE = {"type": "object", "properties": {"city": _TEXT}, "required": ["city"]}
PARAMETERS: dict[str, Any] = {**_PLACE, "additionalProperties": False}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": _TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "The weather of a city"}


class Question(Struct, frozen=True):
    """`Question((("user", "Hi"),), temperature=0)`"""

    messages: tuple[tuple[str, str], ...]
    max_tokens: int = 16
    temperature: float | None = None
    seed: int | None = None
    tools: Literal["", "auto", "required"] = ""
    schema: bool = False
    count: int = 1
    stop: tuple[str, ...] = ()
    model: str = ""
    """An adapter or another model; empty: the default model."""
    picture: str = ""
    """A data URL."""
    previous: Any = None
    """The handle of an earlier answer to continue from: a response id or a context."""

    @property
    def has_known_answer(self) -> bool:
        return self.temperature == 0 or self.seed is not None


def spell(api: Api, question: Question, model: str, stream: bool) -> dict[str, Any]:
    """The body for that API; `model` is for questions that name none."""
    body = {"model": question.model or model, "stream": stream, **_SPELLINGS[api](question)}
    if stream and api in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    return body


def _sampling(question: Question, **more: Any) -> dict[str, Any]:
    named = {"temperature": question.temperature, "seed": question.seed, **more}
    return {name: value for name, value in named.items() if value not in (None, (), "")}


def _messages(question: Question) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in question.messages]
    if question.picture:
        image = {"type": "image_url", "image_url": {"url": question.picture}}
        rows[-1]["content"] = [image, {"type": "text", "text": rows[-1]["content"]}]
    return rows


def _spell_chat(question: Question) -> dict[str, Any]:
    body = _sampling(question, max_tokens=question.max_tokens, stop=question.stop)
    body["messages"] = _messages(question)
    if question.count > 1:
        body["n"] = question.count
    if question.tools:
        body["tools"] = [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}]
        body["tool_choice"] = question.tools
    if question.schema:
        form = {"name": "person", "strict": True, "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


def _spell_completions(question: Question) -> dict[str, Any]:
    body = _sampling(question, max_tokens=question.max_tokens, stop=question.stop)
    if question.count > 1:
        body["n"] = question.count
    return {**body, "prompt": "\n".join(text for _, text in question.messages)}


def _spell_responses(question: Question) -> dict[str, Any]:
    body = _sampling(question, max_output_tokens=question.max_tokens)
    body["previous_response_id"] = question.previous
    body["input"] = _messages(question)
    if question.tools:
        body["tools"] = [{"type": "function", **TOOL, "parameters": PARAMETERS}]
        body["tool_choice"] = question.tools
    if question.schema:
        form = {"type": "json_schema", "name": "person", "strict": True, "schema": SCHEMA}
        body["text"] = {"format": form}
    return body


def _spell_messages(question: Question) -> dict[str, Any]:
    body = _sampling(question, max_tokens=question.max_tokens, stop_sequences=question.stop)
    body["messages"] = _messages(question)
    if question.tools:
        body["tools"] = [{**TOOL, "input_schema": PARAMETERS}]
        body["tool_choice"] = {"type": "any" if question.tools == "required" else "auto"}
    if question.schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return body


def _ollama(question: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "options": _sampling(question, num_predict=question.max_tokens, stop=question.stop)
    }
    if question.schema:
        body["format"] = SCHEMA
    return body


def _spell_ollama_chat(question: Question) -> dict[str, Any]:
    body = {**_ollama(question), "messages": _messages(question)}
    if question.tools:
        body["tools"] = [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}]
    return body


def _spell_ollama_generate(question: Question) -> dict[str, Any]:
    body = {**_ollama(question), "prompt": question.messages[-1][1]}
    return body if question.previous is None else {**body, "context": question.previous}


_SPELLINGS = {
    "chat": _spell_chat,
    "completions": _spell_completions,
    "responses": _spell_responses,
    "messages": _spell_messages,
    "ollama chat": _spell_ollama_chat,
    "ollama generate": _spell_ollama_generate,
}
