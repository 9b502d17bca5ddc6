"""The synchronous client; `async_client.py` has the asynchronous one."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from threading import Timer
from typing import Any

import httpx
import msgspec

from dragoman.client import request as requests
from dragoman.client.base import BaseClient, BaseStream, JsonExchange, JsonReply
from dragoman.client.config import ClientConfig
from dragoman.client.errors import MOST_SAID, ClientError
from dragoman.client.events import AnswerTree, StreamEvent
from dragoman.client.request import Request


class Client(BaseClient["Stream"]):
    """Client of any OpenAI-compatible server. Every answer is streamed; a complete one is folded from its
    events.

    A request is retried up to `retries` times if no part of an answer has arrived. `failures` is a folder in
    which failed requests are saved, without keys, for `dragoman replay`.
    """

    _transport = httpx.HTTPTransport

    def _connect(self, options: dict[str, Any]) -> None:
        self._http = httpx.Client(**options)

    def stream(self, request: Request) -> "Stream":
        return Stream(self._http, self._setup, request)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, body: Any = None) -> JsonReply:
        """Send a request to any other route; returns the decoded JSON with the reply's headers."""
        exchange = JsonExchange(self._setup, method, path)
        content = None if body is None else msgspec.json.encode(body)
        try:
            return exchange.read(self._http.request(method, path, content=content, headers=requests.JSON))
        except httpx.HTTPError as error:
            raise exchange.make_error(error) from error

    def models(self) -> list[dict[str, Any]]:
        return self.request("GET", "/v1/models").entries()


class Stream(BaseStream):
    """One streamed answer. Leaving it (break, close, an exception, garbage collection) disconnects, which
    stops the engine.
    """

    def __init__(self, http: httpx.Client, setup: ClientConfig, request: Request) -> None:
        super().__init__(setup, request)
        self._http = http
        self._response: httpx.Response | None = None

    def __enter__(self) -> "Stream":
        self._send()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._response is not None:
            self._response.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        self._begin()
        try:
            yield from self._events()
        except ClientError as error:
            self._failed(error)
            raise
        finally:
            self.close()

    def answer(self) -> AnswerTree:
        """Read to the end and return the first answer; `answers` has all choices."""
        for _ in self:
            pass
        return self._first()

    def _events(self) -> Iterator[StreamEvent]:
        response = self._send()
        try:
            with _hang_up_after(self._reading.left, response):
                for data in response.iter_bytes():
                    yield from self._reading.feed(data)
                    if self._reading.done:
                        break
        except httpx.HTTPError as error:
            raise self._reading.make_error(error) from error
        yield from self._reading.end()

    def _send(self) -> httpx.Response:
        tried = 0
        while self._response is None:
            try:
                self._response = self._try()
            except ClientError as problem:
                tried += 1
                pause = self._setup.retry_delay(problem, tried, self._reading.left)
                if pause is None:
                    self._failed(problem)
                    raise
                time.sleep(pause)
                self._reading.again()
        return self._response

    def _try(self) -> httpx.Response:
        try:
            self._ask_first()
            return self._post()
        except httpx.HTTPError as error:
            raise self._reading.make_error(error) from error

    def _post(self) -> httpx.Response:
        request = self._reading.request
        asked = self._http.build_request(
            "POST",
            request.path,
            content=msgspec.json.encode(request.body),
            headers={**request.headers, **requests.STREAM},
            timeout=self._setup.timeout_for(self._reading.left),
        )
        response = self._http.send(asked, stream=True)
        self._reading.began(response)
        if response.is_success:
            return response
        raise self._reading.make_refusal(_body(response))

    def _ask_first(self) -> None:
        reply: httpx.Response | None = None
        while (question := self._next_question(reply)) is not None:
            method, path, body = question
            patience = self._setup.timeout_for(self._reading.left)
            reply = self._http.request(method, path, json=body, headers=requests.JSON, timeout=patience)


@contextmanager
def _hang_up_after(seconds: float | None, response: httpx.Response) -> Iterator[None]:
    """Disconnect after the total timeout: a blocking read only knows its own timeout, so a timer ends it."""
    stream = response.extensions.get("network_stream")
    connection = None if seconds is None or stream is None else stream.get_extra_info("socket")
    if connection is None:
        yield
        return
    timer = Timer(seconds or 0.0, _hang_up, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _body(response: httpx.Response) -> bytes:
    """Read the body of an error reply, up to `MOST_SAID` bytes."""
    body = b""
    with closing(response):
        for part in response.iter_bytes():
            body += part
            if len(body) > MOST_SAID:
                break
    return body
