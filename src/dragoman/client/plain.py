"""Requests whose reply is one JSON document."""

from typing import Any

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.client.problems import BrokenStream, ClientError, Refused, Where, problem_with, shown
from dragoman.client.reply import Reply
from dragoman.client.setup import Setup
from dragoman.client.wire import problem_in


class Whole(Struct):
    """A reply and its decoded body."""

    reply: Reply
    body: Any
    where: Where

    def entries(self) -> list[dict[str, Any]]:
        """The entries of a list, each of which has an id."""
        data = self.body.get("data") if isinstance(self.body, dict) else None
        if not isinstance(data, list):
            raise _stranger(self.where)
        return [one for one in data if isinstance(one, dict) and isinstance(one.get("id"), str)]


class PlainExchange:
    """One request of this kind. No socket: both clients read through this."""

    def __init__(self, setup: Setup, method: str, path: str) -> None:
        self._setup = setup
        self._where = Where(f"{method} {setup.url}{path}")

    def read(self, response: httpx.Response) -> Whole:
        reply, data = Reply.of(response), response.content
        where = replace(self._where, status=reply.status, request_id=reply.request_id)
        begun = replace(where, beginning=self._setup.hidden(shown(data)))
        if not response.is_success:
            problem = problem_in(data)
            raise Refused(where if problem else begun, problem, reply)
        try:
            return Whole(reply, msgspec.json.decode(data) if data else None, where)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _stranger(begun) from error

    def failed(self, error: httpx.HTTPError) -> ClientError:
        return problem_with(error, self._setup.url, self._where)


def _stranger(where: Where) -> BrokenStream:
    return BrokenStream("What answers there does not speak the OpenAI API.", where)
