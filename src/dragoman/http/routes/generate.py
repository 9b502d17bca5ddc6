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
from dragoman.api.chat.reply import ChatSpelling
from dragoman.api.chat.request import (
    ChatRequest,
    after_calls,
    has_servers,
    wishes,
    with_tools,
    without_servers,
)
from dragoman.api.chat.stored import KeptStream
from dragoman.api.completions import CompletionRequest, CompletionSpelling, Echo, Unanswered
from dragoman.api.read import Ignored, check_shape
from dragoman.api.reply import ChunkOptions, Head, Speller, StreamWriter, about_bytes, new_head, weight_field
from dragoman.api.shared_fields import KnownTerms, SharedFields
from dragoman.engines.sound import check_sound, wrong_prompt_entries
from dragoman.errors import Unavailable
from dragoman.http import run_turn
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host, ModelHost
from dragoman.http.routes import stored_chat
from dragoman.http.run_turn import AnyTurn, Beginning
from dragoman.limits import Limits, check_count
from dragoman.mcp import McpFailure, McpTool
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import HiddenCalls, ServerWish, Sight, Toolbox, ToolLoop
from dragoman.turns.turn import Turn, note_terms
from dragoman.types import Answer, Conversation, TokenLogprob, Usage


async def chat(shared: Host, exchange: Exchange) -> None:
    (request, spec), size = await exchange.read(partial(_read_chat, shared, exchange), checked=False)
    exchange.visit.within(request.timeout)
    if request.store:
        shared.desk.required("store")
    host = await shared.serving(request.model, exchange, streams=bool(request.stream))
    head = _head(host, exchange, "chatcmpl-", request)
    if spec is not None:
        if request.store:
            await stored_chat.recall(host, exchange, spec)
        turn = await run_turn.plan(host, exchange, spec, size, head.id)
        await _answer_chat(host, exchange, request, turn, head)
        return
    async with AsyncExitStack() as stack:
        # Listing the tools of MCP servers may take time.
        planning = plan_with_servers(host, exchange, request, size, head.id, stack)
        await _answer_chat(host, exchange, request, await unless_gone(exchange, planning), head)


async def _answer_chat(
    host: ModelHost, exchange: Exchange, request: ChatRequest, turn: AnyTurn, head: Head
) -> None:
    answer = _ChatAnswer(host, exchange, request, turn, head, cache(partial(_spell_chat, host, request)))
    await (answer.stream() if request.stream else answer.whole())


def _spell_chat(host: ModelHost, request: ChatRequest) -> ChatSpelling:
    return ChatSpelling(
        _speller(host, request),
        logprobs=bool(request.logprobs),
        legacy=request.legacy,
        reasoning=request.shows_reasoning,
        everywhere=bool(request.separate_reasoning),
        named=request.names_a_tool,
        custom=request.declared.custom,
    )


def _read_chat(host: Host, exchange: Exchange, body: bytes) -> tuple[ChatRequest, TurnSpec | None]:
    """Parse the body to a turn in one step: for large bodies, each hand-over to a thread costs."""
    limits, ignored = host.limits, exchange.ignored
    if host.workers.needed(len(body)):
        request, known = host.known_bodies.read(body, exchange.owner, limits, ignored)
        return request, None if has_servers(request) else chat_request.spec(request, known)
    check_shape(body, limits)
    request = chat_request.READER.read(body, ignored)
    if has_servers(request):
        chat_request.check_request(request, limits, ignored)
        return request, None
    return request, read_terms(request, host.known_terms, limits, ignored)


def read_terms(request: ChatRequest, terms: KnownTerms, limits: Limits, ignored: Ignored) -> TurnSpec:
    """Validate a decoded request and return its turn."""
    key = terms.key(request) if request.messages else b""
    known = terms.get(key)
    if known is not None:
        chat_request.check_said(request, limits)
        return replace(known, prompts=(chat_request.prompt(request),))
    before = ignored.told
    chat_request.check_request(request, limits, ignored)
    spec = chat_request.spec(request)
    if ignored.told == before:
        # Requests with ignored fields are not cached, because these are reported each time.
        terms.keep(key, spec)
    return spec


async def completions(shared: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(completion_bodies.read, limits=shared.limits, ignored=exchange.ignored)
    )
    exchange.visit.within(request.timeout)
    host = await shared.serving(request.model, exchange, streams=bool(request.stream))
    spec = await exchange.aside(size, partial(completion_bodies.spec, request))
    turn = await run_turn.plan(host, exchange, spec, size)
    head = _head(host, exchange, "cmpl-", request)
    wants_logprobs = request.logprobs is not None
    spelling = CompletionSpelling(_speller(host, request), turn.choices, logprobs=wants_logprobs)
    answer = _CompletionAnswer(host, exchange, request, turn, head, lambda: spelling)
    answer.check_told()
    await (answer.stream() if request.stream else answer.whole())


async def generate(shared: Host, exchange: Exchange) -> None:
    """Handle vLLM's route for clients with token ids."""
    reading = partial(completion_bodies.read_generate, limits=shared.limits)
    (request, given), size = await exchange.read(reading)
    exchange.visit.within(request.timeout)
    host = await shared.serving(request.model, exchange)
    spec = await exchange.aside(size, partial(completion_bodies.generate_spec, request))
    turn = await run_turn.plan(host, exchange, spec, size)
    head = _head(host, exchange, "", request)
    spelling = CompletionSpelling(_speller(host, request), turn.choices, logprobs=False)
    id_ = given or exchange.request_id
    await _IdsAnswer(host, exchange, request, turn, head, lambda: spelling, id_).whole()


class _RoutedAnswer(Struct, frozen=True):
    """An answer that is being sent to the client."""

    host: ModelHost
    exchange: Exchange
    request: SharedFields
    turn: AnyTurn
    head: Head
    spelling: Callable[[], ChatSpelling | CompletionSpelling]
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
        return about_bytes(answers, self.told_ids() if tells else 0, beside)

    def told_ids(self) -> int:
        """Return the number of prompt ids in the reply, counted per answer."""
        jobs = self.turn.jobs
        return sum(len(job.prompt) for job in jobs) * self.turn.choices // len(jobs)

    def prompt_logprobs(self) -> list[list[TokenLogprob | None] | None]:
        """Return the log probabilities of the prompts; validated here, in a thread, as there are many."""
        engine, turn = self.host.engine, self.turn
        size = len(engine.tokenizer.pieces)
        for job, told in zip(turn.jobs, turn.prompt_logprobs, strict=True):
            check_sound(engine, wrong_prompt_entries(told or (), size, job.sampling.prompt_logprobs or 0))
        return turn.prompt_logprobs

    def usage(self) -> Usage:
        return self.turn.usage

    def writer(self, *, plain: bool) -> StreamWriter:
        request, turn = self.request, self.turn
        told = ChunkOptions(request.wants_usage, request.wants_running_usage, bool(request.return_token_ids))
        return StreamWriter(
            self.head,
            self.spelling(),
            told,
            self.usage,
            plain=plain,
            weights=lambda: turn.weight_version,
        )

    async def send(self, begin: Beginning, save: Callable[[], Awaitable[None]] | None = None) -> None:
        pump, keep_alive = self.host.pump, self.host.settings.keep_alive
        size = self.opening_bytes()
        await run_turn.stream(self.exchange, self.turn, begin, pump, keep_alive, save, size)


class _ChatAnswer(_RoutedAnswer, frozen=True):
    request: ChatRequest
    spelling: Callable[[], ChatSpelling]

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
        kept = KeptStream(writer, turn.choices)

        async def save() -> None:
            answers = kept.answers()
            size = self.reply_bytes(answers)
            reply = await self.host.workers.run(self.exchange.owner, size, partial(self._reply, answers))
            await stored_chat.save(self.host, self.exchange, request, reply, size, turn.traced)

        await self.send(lambda: (kept, opening), save)

    async def whole(self) -> None:
        host, exchange = self.host, self.exchange
        answers = await run_turn.whole(exchange, self.turn)
        size = self.reply_bytes(answers)

        def write() -> tuple[dict[str, Any], bytes]:
            reply = self._reply(answers)
            return reply, exchange.encoder(size)(reply)

        reply, written = await host.workers.run(exchange.owner, size, write)
        if self._is_kept():
            await stored_chat.save(host, exchange, self.request, reply, size, self.turn.traced)
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


class _CompletionAnswer(_RoutedAnswer, frozen=True):
    request: CompletionRequest
    spelling: Callable[[], CompletionSpelling]

    def check_told(self) -> None:
        if self.request.return_token_ids or self.request.echo:
            field = "return_token_ids" if self.request.return_token_ids else "echo"
            most = self.host.limits.told_ids
            check_count(self.told_ids(), most, field, "prompt ids in all answers together,")

    async def stream(self) -> None:
        turn, writer = self.turn, self.writer(plain=self.request.logprobs is None)

        def opening() -> bytes:
            return completion_bodies.opening(writer, turn.choices, self._echoes(), self._prompts())

        told = Unanswered(writer) if completion_bodies.wants_none(self.request) else writer
        await self.send(lambda: (told, opening))

    def usage(self) -> Usage:
        return completion_bodies.told_usage(self.request, self.turn.usage)

    async def whole(self) -> None:
        request, exchange = self.request, self.exchange
        answers = await run_turn.whole(exchange, self.turn)
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
            speller, told = _speller(self.host, self.request), self.prompt_logprobs()
            for number, choice in enumerate(reply["choices"]):
                choice["prompt_logprobs"] = speller.prompt(told[number * jobs // len(answers)])
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


class _IdsAnswer(_CompletionAnswer, frozen=True):
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


def _head(host: ModelHost, exchange: Exchange, prefix: str, request: SharedFields) -> Head:
    model = exchange.facts["model"] = host.model.planner.name(request.model)
    return new_head(prefix, model, host.fingerprint)


def _speller(host: ModelHost, request: SharedFields) -> Speller:
    return Speller(
        host.model.pieces,
        as_ids=bool(request.return_tokens_as_token_ids),
        skip_special=request.skip_special_tokens is not False,
    )


async def plan_with_servers(
    host: ModelHost,
    exchange: Exchange,
    request: ChatRequest,
    body_bytes: int,
    id_: str,
    stack: AsyncExitStack,
) -> HiddenCalls:
    """Plan an answer for which the server runs tools; `stack` closes the MCP connections."""

    async def plan(spec: TurnSpec) -> Turn:
        return await host.model.turn(spec, exchange.owner, body_bytes, id_)

    asked = wishes(request)
    toolbox, listed = await ask_servers(host, exchange, asked, without_servers(request), body_bytes, stack)
    request, names = with_tools(request, listed)
    chat_request.check_conversation(request, host.limits)
    first = chat_request.spec(request)
    most = host.model.planner.defaults(request.model).most_tokens(first.sampling.max_tokens or None)
    loop = ToolLoop(toolbox, most, exchange.facts)
    turn = await plan(first)
    note_terms(exchange.facts, turn)
    settled = replace(host.model.planner.defaults(request.model).settle(first), owner=exchange.owner)
    remember = partial(host.model.planner.thoughts.add_told, settled, id_)
    return HiddenCalls(loop, turn, after_calls(request), names, plan, remember)


async def ask_servers(
    host: ModelHost,
    exchange: Exchange,
    asked: Sequence[ServerWish],
    known: TurnSpec,
    body_bytes: int,
    stack: AsyncExitStack,
) -> tuple[Toolbox, dict[str, list[McpTool]]]:
    """List the tools of MCP servers, after checking what is known of the turn."""
    (told,) = known.prompts
    shown = told.media if isinstance(told, Conversation) else {}
    sight = Sight(host.model, exchange.owner, shown)
    toolbox = Toolbox(host.mcp, asked, host.limits.tool_calls, sight)
    toolbox.check()
    await host.model.check(known, exchange.owner, body_bytes)
    await stack.enter_async_context(toolbox)
    return toolbox, {wish.label: await _ask(toolbox, wish.label) for wish in asked}


async def _ask(toolbox: Toolbox, label: str) -> list[McpTool]:
    """List the tools of a server; if it is unavailable, an error is the only way to tell the client."""
    try:
        return await toolbox.ask(label)
    except McpFailure as failure:
        raise Unavailable(failure.message, param="tools", code="mcp_unavailable") from None
