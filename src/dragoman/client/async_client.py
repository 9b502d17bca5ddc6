"""The asynchronous client; `sync_client.py` has the synchronous one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import httpx
import msgspec

from dragoman.client import request as requests
from dragoman.client.base import BaseClient, BaseStream, JsonExchange, JsonReply
from dragoman.client.config import ClientConfig
from dragoman.client.errors import MOST_SAID, ClientError
from dragoman.client.events import AnswerTree, StreamEvent
from dragoman.client.request import Request

_REST_S = 1.0
"""Seconds to read the end of a reply after its last event."""


class AsyncClient(BaseClient["AsyncStream"]):
    """`Client` with `await` and `async for`."""

    _transport = httpx.AsyncHTTPTransport

    def _connect(self, options: dict[str, Any]) -> None:
        self._http = httpx.AsyncClient(**options)

    def stream(self, request: Request) -> "AsyncStream":
        return AsyncStream(self._http, self._setup, request)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, body: Any = None) -> JsonReply:
        """Send a request to any other route; returns the decoded JSON with the reply's headers."""
        exchange = JsonExchange(self._setup, method, path)
        content = None if body is None else msgspec.json.encode(body)
        try:
            return exchange.read(
                await self._http.request(method, path, content=content, headers=requests.JSON)
            )
        except httpx.HTTPError as error:
            raise exchange.make_error(error) from error

    async def models(self) -> list[dict[str, Any]]:
        return (await self.request("GET", "/v1/models")).entries()


class AsyncStream(BaseStream):
    """One streamed answer. Leaving it (break, aclose, cancellation, garbage collection) disconnects, which
    stops the engine.
    """

    def __init__(self, http: httpx.AsyncClient, setup: ClientConfig, request: Request) -> None:
        super().__init__(setup, request)
        self._http = http
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> "AsyncStream":
        await self._send()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._response is not None:
            await self._response.aclose()

    async def __aiter__(self) -> AsyncGenerator[StreamEvent, None]:
        self._begin()
        try:
            async with aclosing((await self._send()).aiter_bytes()) as parts:  # type: ignore[type-var]
                while (data := await self._next(parts)) is not None:
                    for event in self._reading.feed(data):
                        yield event
                for event in self._reading.end():
                    yield event
        except ClientError as error:
            self._failed(error)
            raise
        finally:
            await self.aclose()

    async def answer(self) -> AnswerTree:
        """Read to the end and return the first answer; `answers` has all choices."""
        async for _ in self:
            pass
        return self._first()

    async def _next(self, parts: AsyncIterator[bytes]) -> bytes | None:
        try:
            if not self._reading.done:
                async with asyncio.timeout(self._reading.left):
                    return await anext(parts, None)
            await self._rest(parts)
            return None
        except TimeoutError as error:
            raise self._reading.make_timeout() from error
        except httpx.HTTPError as error:
            raise self._reading.make_error(error) from error

    async def _rest(self, parts: AsyncIterator[bytes]) -> None:
        """Read the reply to its end, which lets its connection be reused."""
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_REST_S):
                async for _ in parts:
                    pass

    async def _send(self) -> httpx.Response:
        tried = 0
        while self._response is None:
            try:
                self._response = await self._try()
            except ClientError as problem:
                tried += 1
                pause = self._setup.retry_delay(problem, tried, self._reading.left)
                if pause is None:
                    self._failed(problem)
                    raise
                await asyncio.sleep(pause)
                self._reading.again()
        return self._response

    async def _try(self) -> httpx.Response:
        try:
            async with asyncio.timeout(self._reading.left):
                await self._ask_first()
                return await self._post()
        except TimeoutError as error:
            raise self._reading.make_timeout() from error
        except httpx.HTTPError as error:
            raise self._reading.make_error(error) from error

    async def _post(self) -> httpx.Response:
        request = self._reading.request
        headers = {**request.headers, **requests.STREAM}
        content = msgspec.json.encode(request.body)
        asked = self._http.build_request("POST", request.path, content=content, headers=headers)
        response = await self._http.send(asked, stream=True)
        self._reading.began(response)
        if response.is_success:
            return response
        raise self._reading.make_refusal(await _body(response))

    async def _ask_first(self) -> None:
        reply: httpx.Response | None = None
        while (question := self._next_question(reply)) is not None:
            method, path, body = question
            reply = await self._http.request(method, path, json=body, headers=requests.JSON)


async def _body(response: httpx.Response) -> bytes:
    """Read the body of an error reply, up to `MOST_SAID` bytes."""
    body = b""
    async with aclosing(response):
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_SAID:
                break
    return body
