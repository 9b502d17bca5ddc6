"""The routes that read a text as a model's answer, in the shapes of two other servers."""

from dragoman.api import parsing
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host
from dragoman.types import Answer


async def function_call(host: Host, exchange: Exchange) -> None:
    await exchange.answer(lambda body: parsing.calls_reply(_calls(host, body)))


async def function_call_sglang(host: Host, exchange: Exchange) -> None:
    await exchange.answer(lambda body: parsing.calls_reply_sglang(_calls(host, body)))


async def reasoning(host: Host, exchange: Exchange) -> None:
    await exchange.answer(lambda body: parsing.reasoning_reply(_reasoning(host, body)))


async def reasoning_sglang(host: Host, exchange: Exchange) -> None:
    await exchange.answer(lambda body: parsing.reasoning_reply_sglang(_reasoning(host, body)))


def _calls(host: Host, body: bytes) -> Answer:
    return parsing.parse_calls(parsing.read_calls(body, host.limits), host.model.found.dialect)


def _reasoning(host: Host, body: bytes) -> Answer:
    return parsing.parse_reasoning(parsing.read_reasoning(body, host.limits), host.model.found.dialect)
