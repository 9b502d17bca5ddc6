"""The usual way: a FastAPI route, pydantic models for every chunk, `StreamingResponse` over a generator.

`--models vllm` declares the chunk as vLLM does: unknown fields are allowed and looked for by a validator that
wraps each model. `--models plain` has the same fields on plain models, which is kinder to the peer.
"""

import sys
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Literal, NamedTuple
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from bench.pulse import Collector, Pulse
from bench.servers import options
from bench.words import WORDS

Finish = Literal["stop", "length", "tool_calls"]


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[Message]
    max_tokens: int
    temperature: float = 1.0
    stream: bool = False
    stream_options: dict[str, bool] | None = None


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class PlainDelta(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)


class PlainChoice(BaseModel):
    index: int
    delta: PlainDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class PlainChunk(BaseModel):
    id: str = Field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[PlainChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None


class Watchful(BaseModel):
    """Takes any field and looks whether it knew it."""

    model_config = ConfigDict(extra="allow")
    known: ClassVar[set[str] | None] = None

    @model_validator(mode="wrap")
    @classmethod
    def look(cls, data: Any, handler: ModelWrapValidatorHandler["Watchful"]) -> "Watchful":
        watchful = handler(data)
        if isinstance(data, dict):
            if cls.known is None:
                cls.known = set(cls.model_fields)
            if any(name not in cls.known for name in data):
                sys.stderr.write("a field is unknown\n")
        return watchful


class WatchfulDelta(Watchful, PlainDelta):
    pass


class WatchfulChoice(Watchful, PlainChoice):
    delta: WatchfulDelta


class WatchfulChunk(Watchful, PlainChunk):
    choices: list[WatchfulChoice]  # type: ignore[assignment]  # lists are invariant; this one is only made


class Kind(NamedTuple):
    """The models of one way to declare them."""

    delta: type[PlainDelta]
    choice: type[PlainChoice]
    chunk: type[PlainChunk]


KINDS = {
    "plain": Kind(PlainDelta, PlainChoice, PlainChunk),
    "vllm": Kind(WatchfulDelta, WatchfulChoice, WatchfulChunk),
}


class Chat:
    def __init__(self, pulse: Pulse, kind: Kind) -> None:
        self._pulse = pulse
        self._kind = kind

    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": "scripted"}]}

    async def chat(self, request: ChatRequest) -> Any:
        return StreamingResponse(self._events(request.model), media_type="text/event-stream")

    async def _events(self, model: str) -> AsyncIterator[str]:
        id_, created = f"chatcmpl-{uuid4().hex}", int(time.time())
        collector = Collector(self._pulse)

        def event(choices: list[PlainChoice], usage: Usage | None = None) -> str:
            chunk = self._kind.chunk(id=id_, created=created, model=model, choices=choices, usage=usage)
            return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

        def choice(finish: Finish | None = None, **delta: Any) -> PlainChoice:
            return self._kind.choice(
                index=0, delta=self._kind.delta(**delta), logprobs=None, finish_reason=finish
            )

        yield event([choice(role="assistant", content="")])
        over = False
        while not over:
            for number in await collector.get():
                over = collector.ends(number)
                word = WORDS[number % len(WORDS)]
                yield event([choice("length" if over else None, content=word)])
        count = self._pulse.tokens
        yield event([], Usage(prompt_tokens=0, completion_tokens=count, total_tokens=count))
        yield "data: [DONE]\n\n"


def app(pulse: Pulse, kind: Kind) -> Any:
    chat, served = Chat(pulse, kind), FastAPI()
    served.add_api_route("/v1/models", chat.models, methods=["GET"])
    served.add_api_route("/v1/chat/completions", chat.chat, methods=["POST"], response_model=None)
    return served


if __name__ == "__main__":
    parser = options.parser("FastAPI and pydantic around an engine without a model")
    parser.add_argument("--models", choices=KINDS, default="vllm", help="how chunks are declared")
    args = parser.parse_args()
    served = app(Pulse(args.streams, args.tokens), KINDS[args.models])
    uvicorn.run(served, port=args.port, access_log=False, log_level="warning")
