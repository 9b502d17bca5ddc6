"""Routes that generate: Chat Completions, Completions and vLLM's generate."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dragoman.api import completions as completion_bodies
from dragoman.api.chat import reply as chat_reply
from dragoman.api.chat import request as chat_request
from dragoman.api.chat.reply import ChatSerializer
from dragoman.api.chat.request import (
    ChatRequest,
    follow_up_spec,
    has_servers,
    requested_servers,
    with_mcp_tools,
    without_servers,
)
from dragoman.api.chat.stored import RecordingWriter
from dragoman.api.completions import CompletionRequest, CompletionSerializer, Echo, FinishOnlyWriter
from dragoman.api.reply import (
    ChunkOptions,
    LogprobSerializer,
    ReplyEnvelope,
    StreamWriter,
    estimate_bytes,
    new_head,
    weight_field,
)
from dragoman.api.request_decoder import IgnoredFields, check_shape
from dragoman.api.shared_fields import SharedFields, TurnSpecCache
from dragoman.engines.contract import raise_on_fault, wrong_prompt_entries
from dragoman.errors import Unavailable
from dragoman.http import run_turn
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.http.routes import stored_chat
from dragoman.http.run_turn import AnyTurn, Beginning
from dragoman.limits import Limits, check_count
from dragoman.mcp import McpFailure, McpTool
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import (
    McpServerRequest,
    McpToolset,
    MultiTurnAnswer,
    ResultMediaFilter,
    ToolLoop,
)
from dragoman.turns.turn import Turn, log_terms
from dragoman.types import Answer, Conversation, TokenLogprob, Usage


async def chat(shared: AppState, exchange: Exchange) -> None:
    (request, spec), size = await exchange.read(partial(_read_chat, shared, exchange), checked=False)
    exchange.active.set_timeout(request.timeout)
    if request.store:
        shared.responses.require_store("store")
    host = await shared.acquire_model(request.model, exchange, streams=bool(request.stream))
    head = _head(host, exchange, "chatcmpl-", request)
    if spec is not None:
        if request.store:
            await stored_chat.recall(host, exchange, spec)
        turn = await run_turn.plan_turn(host, exchange, spec, size, head.id)
        await _answer_chat(host, exchange, request, turn, head)
        return
    async with AsyncExitStack() as stack:
        # Listing the tools of MCP servers may take time.
        planning = plan_with_servers(host, exchange, request, size, head.id, stack)
        await _answer_chat(host, exchange, request, await cancel_on_disconnect(exchange, planning), head)


async def _answer_chat(
    host: ModelServing, exchange: Exchange, request: ChatRequest, turn: AnyTurn, head: ReplyEnvelope
) -> None:
    answer = _ChatReply(host, exchange, request, turn, head, cache(partial(_spell_chat, host, request)))
    await (answer.stream() if request.stream else answer.whole())


def _spell_chat(host: ModelServing, request: ChatRequest) -> ChatSerializer:
    return ChatSerializer(
        _speller(host, request),
        logprobs=bool(request.logprobs),
        legacy=request.legacy,
        reasoning=request.shows_reasoning,
        everywhere=bool(request.separate_reasoning),
        named=request.names_a_tool,
        custom=request.declared.custom,
    )


def _read_chat(host: AppState, exchange: Exchange, body: bytes) -> tuple[ChatRequest, TurnSpec | None]:
    """Parse the body to a turn in one step: for large bodies, each hand-over to a thread costs."""
    limits, ignored = host.limits, exchange.ignored
    if host.workers.should_offload(len(body)):
        request, known = host.body_cache.read(body, exchange.owner, limits, ignored)
        return request, None if has_servers(request) else chat_request.spec(request, known)
    check_shape(body, limits)
    request = chat_request.READER.read(body, ignored)
    if has_servers(request):
        chat_request.check_request(request, limits, ignored)
        return request, None
    return request, read_terms(request, host.spec_cache, limits, ignored)


def read_terms(
    request: ChatRequest, terms: TurnSpecCache, limits: Limits, ignored: IgnoredFields
) -> TurnSpec:
    """Validate a decoded request and return its turn."""
    key = terms.key(request) if request.messages else b""
    known = terms.get(key)
    if known is not None:
        chat_request.check_said(request, limits)
        return replace(known, prompts=(chat_request.prompt(request),))
    before = ignored.summary
    chat_request.check_request(request, limits, ignored)
    spec = chat_request.spec(request)
    if ignored.summary == before:
        # Requests with ignored fields are not cached, because these are reported each time.
        terms.keep(key, spec)
    return spec


async def completions(shared: AppState, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(completion_bodies.read, limits=shared.limits, ignored=exchange.ignored)
    )
    exchange.active.set_timeout(request.timeout)
    host = await shared.acquire_model(request.model, exchange, streams=bool(request.stream))
    spec = await exchange.offload(size, partial(completion_bodies.spec, request))
    turn = await run_turn.plan_turn(host, exchange, spec, size)
    head = _head(host, exchange, "cmpl-", request)
    wants_logprobs = request.logprobs is not None
    spelling = CompletionSerializer(_speller(host, request), turn.choices, logprobs=wants_logprobs)
    answer = _CompletionReply(host, exchange, request, turn, head, lambda: spelling)
    answer.check_told()
    await (answer.stream() if request.stream else answer.whole())


async def generate(shared: AppState, exchange: Exchange) -> None:
    """Handle vLLM's route for clients with token ids."""
    reading = partial(completion_bodies.read_generate, limits=shared.limits)
    (request, text), size = await exchange.read(reading)
    exchange.active.set_timeout(request.timeout)
    host = await shared.acquire_model(request.model, exchange)
    spec = await exchange.offload(size, partial(completion_bodies.generate_spec, request))
    turn = await run_turn.plan_turn(host, exchange, spec, size)
    head = _head(host, exchange, "", request)
    spelling = CompletionSerializer(_speller(host, request), turn.choices, logprobs=False)
    id_ = text or exchange.request_id
    await _IdsReply(host, exchange, request, turn, head, lambda: spelling, id_).whole()


class _GenerationReply(Struct, frozen=True):
    """An answer that is being sent to the client."""

    host: ModelServing
    exchange: Exchange
    request: SharedFields
    turn: AnyTurn
    head: ReplyEnvelope
    spelling: Callable[[], ChatSerializer | CompletionSerializer]
    """Returns the same object each time; created once the engine has the turn."""

    def opening_bytes(self) -> int:
        """Estimate the size of the start of a stream, which may contain the prompt once per answer."""
        tells = self.request.return_token_ids or self.request.echo
        return 8 * self.told_ids() if tells else 0

    def reply_bytes(self, answers: Sequence[Answer]) -> int:
        """Estimate the size of a full reply: a large one is encoded in a thread."""
        request = self.request
        beside = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
        tells = beside or request.return_token_ids or request.echo
        return estimate_bytes(answers, self.told_ids() if tells else 0, beside)

    def told_ids(self) -> int:
        """Return the number of prompt ids in the reply, counted per answer."""
        jobs = self.turn.jobs
        return sum(len(job.prompt) for job in jobs) * self.turn.choices // len(jobs)

    def prompt_logprobs(self) -> list[list[TokenLogprob | None] | None]:
        """Return the log probabilities of the prompts; validated here, in a thread, as there are many."""
        engine, turn = self.host.engine, self.turn
        size = len(engine.tokenizer.pieces)
        for job, logprobs in zip(turn.jobs, turn.prompt_logprobs, strict=True):
            raise_on_fault(
                engine, wrong_prompt_entries(logprobs or (), size, job.sampling.prompt_logprobs or 0)
            )
        return turn.prompt_logprobs

    def usage(self) -> Usage:
        return self.turn.usage

    def writer(self, *, plain: bool) -> StreamWriter:
        request, turn = self.request, self.turn
        options = ChunkOptions(
            request.wants_usage, request.wants_running_usage, bool(request.return_token_ids)
        )
        return StreamWriter(
            self.head,
            self.spelling(),
            options,
            self.usage,
            plain=plain,
            weights=lambda: turn.weight_version,
        )

    async def send(self, begin: Beginning, save: Callable[[], Awaitable[None]] | None = None) -> None:
        pump, keep_alive = self.host.pump, self.host.settings.keep_alive
        size = self.opening_bytes()
        await run_turn.stream_turn(self.exchange, self.turn, begin, pump, keep_alive, save, size)


class _ChatReply(_GenerationReply, frozen=True):
    request: ChatRequest
    spelling: Callable[[], ChatSerializer]

    def _begin(self) -> tuple[StreamWriter, Callable[[], bytes]]:
        request, turn = self.request, self.turn
        writer = self.writer(plain=not request.logprobs)
        prompt = turn.jobs[0].prompt if request.return_token_ids else None

        def opening() -> bytes:
            echoed = chat_request.echo_text(request)
            return chat_reply.opening(writer, self.spelling(), turn.choices, echoed, prompt)

        return writer, opening

    async def stream(self) -> None:
        request, turn = self.request, self.turn
        if not self._is_kept():
            await self.send(self._begin)
            return
        writer, opening = self._begin()
        kept = RecordingWriter(writer, turn.choices)

        async def save() -> None:
            answers = kept.answers()
            size = self.reply_bytes(answers)
            reply = await self.host.workers.run(self.exchange.owner, size, partial(self._reply, answers))
            await stored_chat.save(self.host, self.exchange, request, reply, size, turn.records)

        await self.send(lambda: (kept, opening), save)

    async def whole(self) -> None:
        host, exchange = self.host, self.exchange
        answers = await run_turn.collect_answers(exchange, self.turn)
        size = self.reply_bytes(answers)

        def write() -> tuple[dict[str, Any], bytes]:
            reply = self._reply(answers)
            return reply, exchange.encoder(size)(reply)

        reply, written = await host.workers.run(exchange.owner, size, write)
        if self._is_kept():
            await stored_chat.save(host, exchange, self.request, reply, size, self.turn.records)
        await exchange.reply(written, b"application/json")

    def _reply(self, answers: list[Answer]) -> dict[str, Any]:
        request, turn = self.request, self.turn
        reply = chat_reply.whole(
            self.head,
            answers,
            turn.usage,
            self.spelling(),
            echoed=chat_request.echo_text(request),
            prompt_ids=turn.jobs[0].prompt if request.return_token_ids else None,
            weight_version=turn.weight_version,
        )
        if request.prompt_logprobs is not None:
            reply["prompt_logprobs"] = _speller(self.host, request).prompt(self.prompt_logprobs()[0])
        return reply

    def _is_kept(self) -> bool:
        """Return whether the answer, or at least its ids, is stored."""
        return bool(self.request.store) or self.host.settings.trajectories


class _CompletionReply(_GenerationReply, frozen=True):
    request: CompletionRequest
    spelling: Callable[[], CompletionSerializer]

    def check_told(self) -> None:
        if self.request.return_token_ids or self.request.echo:
            field = "return_token_ids" if self.request.return_token_ids else "echo"
            most = self.host.limits.told_ids
            check_count(self.told_ids(), most, field, "prompt ids in all answers together,")

    async def stream(self) -> None:
        turn, writer = self.turn, self.writer(plain=self.request.logprobs is None)

        def opening() -> bytes:
            return completion_bodies.opening(writer, turn.choices, self._echoes(), self._prompts())

        item = FinishOnlyWriter(writer) if completion_bodies.wants_none(self.request) else writer
        await self.send(lambda: (item, opening))

    def usage(self) -> Usage:
        return completion_bodies.visible_usage(self.request, self.turn.usage)

    async def whole(self) -> None:
        request, exchange = self.request, self.exchange
        answers = await run_turn.collect_answers(exchange, self.turn)
        if completion_bodies.wants_none(request):
            answers = [completion_bodies.without_text(answer) for answer in answers]
        if completion_bodies.ranks(request):
            answers = completion_bodies.best(answers, request.best_of or 1, request.n or 1)
        size = self.reply_bytes(answers)
        write = exchange.encoder(size)
        written = await self.host.workers.run(exchange.owner, size, lambda: write(self._reply(answers)))
        await exchange.reply(written, b"application/json")

    def _reply(self, answers: list[Answer]) -> dict[str, Any]:
        turn, jobs = self.turn, len(self.turn.jobs)
        reply = completion_bodies.whole(
            self.head,
            answers,
            self.usage(),
            self.spelling(),
            jobs,
            self._echoes(),
            self._prompts(),
            turn.weight_version,
        )
        if self.request.prompt_logprobs is not None:
            speller, items = _speller(self.host, self.request), self.prompt_logprobs()
            for number, choice in enumerate(reply["choices"]):
                choice["prompt_logprobs"] = speller.prompt(items[number * jobs // len(answers)])
        return reply

    def _prompts(self) -> list[tuple[int, ...]] | None:
        return [job.prompt for job in self.turn.jobs] if self.request.return_token_ids else None

    def _echoes(self) -> list[Echo]:
        if not self.request.echo:
            return []
        text = partial(
            self.host.model.pieces.text, skip_special=self.request.skip_special_tokens is not False
        )
        return [
            Echo(text(job.prompt), job.prompt, logprobs)
            for job, logprobs in zip(self.turn.jobs, self.prompt_logprobs(), strict=True)
        ]


class _IdsReply(_CompletionReply, frozen=True):
    id: str = ""

    def _reply(self, answers: list[Answer]) -> dict[str, Any]:
        request, turn = self.request, self.turn
        speller = _speller(self.host, request)
        logprobs = request.logprobs is not None
        reply = completion_bodies.generate_reply(self.id, answers, speller, turn.usage, logprobs=logprobs)
        if request.return_token_ids:
            reply["prompt_token_ids"] = turn.jobs[0].prompt
        if request.prompt_logprobs is not None:
            reply["prompt_logprobs"] = speller.prompt(self.prompt_logprobs()[0])
        return reply | weight_field(turn.weight_version)


def _head(host: ModelServing, exchange: Exchange, prefix: str, request: SharedFields) -> ReplyEnvelope:
    model = exchange.log_fields["model"] = host.model.planner.name(request.model)
    return new_head(prefix, model, host.fingerprint)


def _speller(host: ModelServing, request: SharedFields) -> LogprobSerializer:
    return LogprobSerializer(
        host.model.pieces,
        as_ids=bool(request.return_tokens_as_token_ids),
        skip_special=request.skip_special_tokens is not False,
    )


async def plan_with_servers(
    host: ModelServing,
    exchange: Exchange,
    request: ChatRequest,
    body_bytes: int,
    id_: str,
    stack: AsyncExitStack,
) -> MultiTurnAnswer:
    """Plan an answer for which the server runs tools; `stack` closes the MCP connections."""

    async def plan(spec: TurnSpec) -> Turn:
        return await host.model.create_turn(spec, exchange.owner, body_bytes, id_)

    asked = requested_servers(request)
    toolbox, listed = await ask_servers(host, exchange, asked, without_servers(request), body_bytes, stack)
    request, names = with_mcp_tools(request, listed)
    chat_request.check_conversation(request, host.limits)
    first = chat_request.spec(request)
    most = host.model.planner.defaults(request.model).max_total_tokens(first.sampling.max_tokens or None)
    loop = ToolLoop(toolbox, most, exchange.log_fields)
    turn = await plan(first)
    log_terms(exchange.log_fields, turn)
    settled = replace(host.model.planner.defaults(request.model).apply(first), owner=exchange.owner)
    remember = partial(host.model.planner.reasoning_memory.add_told, settled, id_)
    return MultiTurnAnswer(loop, turn, follow_up_spec(request), names, plan, remember)


async def ask_servers(
    host: ModelServing,
    exchange: Exchange,
    asked: Sequence[McpServerRequest],
    known: TurnSpec,
    body_bytes: int,
    stack: AsyncExitStack,
) -> tuple[McpToolset, dict[str, list[McpTool]]]:
    """List the tools of MCP servers, after checking what is known of the turn."""
    (item,) = known.prompts
    shown = item.media if isinstance(item, Conversation) else {}
    sight = ResultMediaFilter(host.model, exchange.owner, shown)
    toolbox = McpToolset(host.mcp, asked, host.limits.tool_calls, sight)
    toolbox.check()
    await host.model.check(known, exchange.owner, body_bytes)
    await stack.enter_async_context(toolbox)
    return toolbox, {wish.label: await _ask(toolbox, wish.label) for wish in asked}


async def _ask(toolbox: McpToolset, label: str) -> list[McpTool]:
    """List the tools of a server; if it is unavailable, an error is the only way to tell the client."""
    try:
        return await toolbox.list_tools(label)
    except McpFailure as failure:
        raise Unavailable(failure.message, param="tools", code="mcp_unavailable") from None
