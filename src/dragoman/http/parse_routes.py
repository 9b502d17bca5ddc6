"""The routes that read a text as a model's answer, in the shapes of two other servers."""

from dragoman.api import parsing
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host
from dragoman.types import Answer


async def function_call(host: Host, exchange: Exchange) -> None:
    await exchange.json(parsing.calls_reply(await _calls(host, exchange)))


async def function_call_sglang(host: Host, exchange: Exchange) -> None:
    await exchange.json(parsing.calls_reply_sglang(await _calls(host, exchange)))


async def reasoning(host: Host, exchange: Exchange) -> None:
    await exchange.json(parsing.reasoning_reply(await _reasoning(host, exchange)))


async def reasoning_sglang(host: Host, exchange: Exchange) -> None:
    await exchange.json(parsing.reasoning_reply_sglang(await _reasoning(host, exchange)))


async def _calls(host: Host, exchange: Exchange) -> Answer:
    body = await exchange.body()
    request = parsing.read_calls(body, host.limits)
    own = host.found.dialect
    return await host.prepare(len(body), lambda given: parsing.parse_calls(given, own), request)


async def _reasoning(host: Host, exchange: Exchange) -> Answer:
    body = await exchange.body()
    request = parsing.read_reasoning(body, host.limits)
    own = host.found.dialect
    return await host.prepare(len(body), lambda given: parsing.parse_reasoning(given, own), request)
