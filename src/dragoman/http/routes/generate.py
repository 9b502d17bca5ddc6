"""The routes that generate: Chat Completions and Completions."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

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
from dragoman.api.completions import CompletionRequest, CompletionSpelling, Echo
from dragoman.api.reply import ChunkOptions, Head, Speller, StreamWriter, about_bytes, new_head
from dragoman.api.shared_fields import SharedFields
from dragoman.engines.sound import check_sound, wrong_prompt_entries
from dragoman.errors import Unavailable
from dragoman.http import run_turn
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host
from dragoman.http.routes import stored_chat
from dragoman.http.run_turn import AnyTurn
from dragoman.limits import check_count
from dragoman.mcp import McpFailure, McpTool
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import HiddenCalls, Toolbox, ToolLoop
from dragoman.turns.turn import Turn
from dragoman.types import Answer, TokenLogprob


async def chat(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(chat_request.read, limits=host.limits))
    exchange.visit.within(request.timeout)
    if request.store:
        host.desk.required("store")
    async with AsyncExitStack() as stack:
        head = _head(host, exchange, "chatcmpl-", request)
        turn = await _chat_turn(host, exchange, request, size, head.id, stack)
        await _answer_chat(host, exchange, request, turn, head)


async def _chat_turn(
    host: Host, exchange: Exchange, request: ChatRequest, body_bytes: int, id_: str, stack: AsyncExitStack
) -> AnyTurn:
    if has_servers(request):
        # They are asked what they have, which may take its time.
        return await unless_gone(exchange, plan_with_servers(host, exchange, request, body_bytes, id_, stack))
    spec = await exchange.aside(body_bytes, partial(chat_request.spec, request))
    return await run_turn.plan(host, exchange, spec, body_bytes, id_)


def _check_told(host: Host, request: SharedFields, turn: Turn) -> None:
    if request.return_token_ids or request.echo:
        field = "return_token_ids" if request.return_token_ids else "echo"
        check_count(_told_ids(turn), host.limits.told_ids, field, "ids of prompts, of all answers together,")


async def _answer_chat(
    host: Host, exchange: Exchange, request: ChatRequest, turn: AnyTurn, head: Head
) -> None:
    spelling = ChatSpelling(
        _speller(host, request),
        logprobs=bool(request.logprobs),
        legacy=request.legacy,
        reasoning=request.include_reasoning is not False,
        named=request.names_a_tool,
        custom=request.declared.custom,
    )
    if request.stream:
        await _stream_chat(host, exchange, request, turn, head, spelling)
    else:
        await _whole_chat(host, exchange, request, turn, head, spelling)


async def _stream_chat(
    host: Host, exchange: Exchange, request: ChatRequest, turn: AnyTurn, head: Head, spelling: ChatSpelling
) -> None:
    writer = _writer(head, spelling, request, turn, plain=not request.logprobs)
    prompt = turn.jobs[0].prompt if request.return_token_ids else None

    def opening() -> bytes:
        return chat_reply.opening(writer, turn.choices, chat_request.echo_text(request), prompt)

    size = _opening_bytes(request, turn)
    if not _keeps(host, request):
        await run_turn.stream(
            exchange, turn, writer, opening, host.pump, host.settings.keep_alive, None, size
        )
        return
    kept = KeptStream(writer, turn.choices)

    async def save() -> None:
        answers = kept.answers()
        size = _reply_bytes(request, turn, answers)
        work = partial(_chat_reply, host, request, turn, head, spelling, answers)
        reply = await host.workers.run(exchange.owner, size, work)
        await stored_chat.save(host, exchange, request, reply, size, turn.traced)

    await run_turn.stream(exchange, turn, kept, opening, host.pump, host.settings.keep_alive, save, size)


async def _whole_chat(
    host: Host, exchange: Exchange, request: ChatRequest, turn: AnyTurn, head: Head, spelling: ChatSpelling
) -> None:
    answers = await run_turn.whole(exchange, turn)

    def told() -> tuple[dict[str, Any], bytes]:
        reply = _chat_reply(host, request, turn, head, spelling, answers)
        return reply, exchange.encoder(size)(reply)

    size = _reply_bytes(request, turn, answers)
    reply, written = await host.workers.run(exchange.owner, size, told)
    if _keeps(host, request):
        await stored_chat.save(host, exchange, request, reply, size, turn.traced)
    await exchange.reply(written, b"application/json")


def _chat_reply(
    host: Host,
    request: ChatRequest,
    turn: AnyTurn,
    head: Head,
    spelling: ChatSpelling,
    answers: list[Answer],
) -> dict[str, Any]:
    reply = chat_reply.whole(
        head,
        answers,
        turn.usage,
        spelling,
        echoed=chat_request.echo_text(request),
        prompt_ids=turn.jobs[0].prompt if request.return_token_ids else None,
        weight_version=turn.weight_version,
    )
    if request.prompt_logprobs is not None:
        reply["prompt_logprobs"] = _speller(host, request).prompt(_prompt_logprobs(host, turn)[0])
    return reply


async def completions(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(completion_bodies.read, limits=host.limits))
    exchange.visit.within(request.timeout)
    spec = await exchange.aside(size, partial(completion_bodies.spec, request))
    turn = await run_turn.plan(host, exchange, spec, size)
    _check_told(host, request, turn)
    head = _head(host, exchange, "cmpl-", request)
    wants_logprobs = request.logprobs is not None
    spelling = CompletionSpelling(_speller(host, request), turn.choices, logprobs=wants_logprobs)
    if request.stream:
        await _stream_completions(host, exchange, request, turn, head, spelling)
    else:
        await _whole_completions(host, exchange, request, turn, head, spelling)


async def _stream_completions(
    host: Host,
    exchange: Exchange,
    request: CompletionRequest,
    turn: Turn,
    head: Head,
    spelling: CompletionSpelling,
) -> None:
    writer = _writer(head, spelling, request, turn, plain=request.logprobs is None)
    prompts = [job.prompt for job in turn.jobs] if request.return_token_ids else None

    def opening() -> bytes:
        return completion_bodies.opening(writer, turn.choices, _echoes(host, request, turn), prompts)

    size = _opening_bytes(request, turn)
    await run_turn.stream(exchange, turn, writer, opening, host.pump, host.settings.keep_alive, None, size)


async def _whole_completions(
    host: Host,
    exchange: Exchange,
    request: CompletionRequest,
    turn: Turn,
    head: Head,
    spelling: CompletionSpelling,
) -> None:
    answers = await run_turn.whole(exchange, turn)
    if completion_bodies.ranks(request):
        answers = completion_bodies.best(answers, request.best_of or 1, request.n or 1)
    work = partial(_completions_reply, host, request, turn, head, spelling, answers)
    size = _reply_bytes(request, turn, answers)
    written = await host.workers.run(exchange.owner, size, lambda: exchange.encoder(size)(work()))
    await exchange.reply(written, b"application/json")


def _completions_reply(
    host: Host,
    request: CompletionRequest,
    turn: Turn,
    head: Head,
    spelling: CompletionSpelling,
    answers: list[Answer],
) -> dict[str, Any]:
    prompts = [job.prompt for job in turn.jobs] if request.return_token_ids else None
    reply = completion_bodies.whole(
        head,
        answers,
        turn.usage,
        spelling,
        len(turn.jobs),
        _echoes(host, request, turn),
        prompts,
        turn.weight_version,
    )
    if request.prompt_logprobs is not None:
        speller, told = _speller(host, request), _prompt_logprobs(host, turn)
        for number, choice in enumerate(reply["choices"]):
            entries = told[number * len(turn.jobs) // len(answers)]
            choice["prompt_logprobs"] = speller.prompt(entries)
    return reply


def _opening_bytes(request: SharedFields, turn: AnyTurn) -> int:
    """About how long the beginning of a stream is, which may say the prompt once for each answer."""
    tells = request.return_token_ids or request.echo
    return 8 * _told_ids(turn) if tells else 0


def _reply_bytes(request: SharedFields, turn: AnyTurn, answers: Sequence[Answer]) -> int:
    """About how long a whole reply is: a long one is written in a thread."""
    beside = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
    tells = beside or request.return_token_ids or request.echo
    return about_bytes(answers, _told_ids(turn) if tells else 0, beside)


def _told_ids(turn: AnyTurn) -> int:
    """Of prompts, where each answer says its own."""
    return sum(len(job.prompt) for job in turn.jobs) * turn.choices // len(turn.jobs)


def _echoes(host: Host, request: CompletionRequest, turn: Turn) -> list[Echo]:
    if not request.echo:
        return []
    return [
        Echo(
            host.model.pieces.text(job.prompt, skip_special=request.skip_special_tokens is not False),
            job.prompt,
            logprobs,
        )
        for job, logprobs in zip(turn.jobs, _prompt_logprobs(host, turn), strict=True)
    ]


def _prompt_logprobs(host: Host, turn: AnyTurn) -> list[list[TokenLogprob | None] | None]:
    """Looked at where they are told, not where the engine gives them: they are many, and here is a thread."""
    size = len(host.engine.tokenizer.pieces)
    for job, told in zip(turn.jobs, turn.prompt_logprobs, strict=True):
        check_sound(host.engine, wrong_prompt_entries(told or (), size, job.sampling.prompt_logprobs or 0))
    return turn.prompt_logprobs


def _head(host: Host, exchange: Exchange, prefix: str, request: SharedFields) -> Head:
    model = exchange.facts["model"] = host.model.planner.name(request.model)
    return new_head(prefix, model, host.fingerprint)


def _speller(host: Host, request: SharedFields) -> Speller:
    return Speller(
        host.model.pieces,
        as_ids=bool(request.return_tokens_as_token_ids),
        skip_special=request.skip_special_tokens is not False,
    )


def _writer(
    head: Head,
    spelling: ChatSpelling | CompletionSpelling,
    request: SharedFields,
    turn: AnyTurn,
    *,
    plain: bool,
) -> StreamWriter:
    options = ChunkOptions(request.wants_usage, request.wants_running_usage, bool(request.return_token_ids))
    return StreamWriter(
        head, spelling, options, lambda: turn.usage, plain=plain, weights=lambda: turn.weight_version
    )


async def plan_with_servers(
    host: Host, exchange: Exchange, request: ChatRequest, body_bytes: int, id_: str, stack: AsyncExitStack
) -> HiddenCalls:
    """An answer for which the server runs tools; its connections are the stack's."""

    async def plan(spec: TurnSpec) -> Turn:
        return await host.model.turn(spec, exchange.owner, body_bytes, id_)

    asked = wishes(request)
    toolbox = Toolbox(host.mcp, asked, host.limits.tool_calls)
    toolbox.check()
    await host.model.check(without_servers(request), exchange.owner, body_bytes)
    await stack.enter_async_context(toolbox)
    listed = {wish.label: await _ask(toolbox, wish.label) for wish in asked}
    request, names = with_tools(request, listed)
    chat_request.check_conversation(request, host.limits)
    first = chat_request.spec(request)
    most = host.model.planner.defaults(request.model).most_tokens(first.sampling.max_tokens or None)
    loop = ToolLoop(toolbox, most, exchange.facts)
    return HiddenCalls(loop, await plan(first), after_calls(request), names, plan)


async def _ask(toolbox: Toolbox, label: str) -> list[McpTool]:
    """A client of this API has no way to see that a server is not there, other than a failure."""
    try:
        return await toolbox.ask(label)
    except McpFailure as failure:
        raise Unavailable(failure.message, param="tools", code="mcp_unavailable") from None


def _keeps(host: Host, request: ChatRequest) -> bool:
    """Whether anything of the answer is kept: all of it, or at least its ids."""
    return bool(request.store) or host.settings.trajectories
