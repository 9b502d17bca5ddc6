"""What the commands ask of a running server, over its public API and nothing else."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx
import msgspec

from dragoman.cli.address import headers_of, root_of
from dragoman.cli.problems import CommandError
from dragoman.cli.sse import DONE, Chunk, Events, read_chunk

SERVER_HINT = "`dragoman serve` starts a server; --url says where another one is."

LOOK_S = 1.0


class Client:
    def __init__(self, url: str, key: str | None = None, *, timeout: float = 600.0) -> None:
        self.url = root_of(url)
        self._http = httpx.Client(
            base_url=self.url, headers=headers_of(key), timeout=httpx.Timeout(timeout, connect=5.0)
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        with self._meeting():
            response = self._http.get("/v1/models")
            self._expect_success(response)
            try:
                data = msgspec.json.decode(response.content, type=dict[str, Any]).get("data")
            except msgspec.DecodeError as error:
                raise self._stranger() from error
        if not isinstance(data, list):
            raise self._stranger()
        return [model for model in data if isinstance(model, dict) and isinstance(model.get("id"), str)]

    def first_model(self) -> str:
        models = self.models()
        if not models:
            raise CommandError(f"The server at {self.url} has no model.")
        return str(models[0]["id"])

    def chat(self, body: Mapping[str, Any]) -> Generator[Chunk, None, None]:
        """The chunks of a streamed answer. Closing the iterator hangs up, which stops the engine."""
        events = Events()
        with self._meeting(), self._http.stream("POST", "/v1/chat/completions", json=dict(body)) as response:
            if response.status_code >= 400:
                response.read()
            self._expect_success(response)
            for data in response.iter_bytes():
                for event in events.feed(data):
                    if event == DONE:
                        return
                    yield self._chunk(event)

    def _chunk(self, event: bytes) -> Chunk:
        try:
            chunk = read_chunk(event)
        except msgspec.DecodeError as error:
            raise self._stranger() from error
        if chunk.error is not None:
            raise CommandError(chunk.error.message)
        return chunk

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Turn the ways in which a connection fails into sentences."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise CommandError(f"Nothing answers at {self.url}.", SERVER_HINT) from error
        except httpx.TimeoutException as error:
            raise CommandError(f"The server at {self.url} is silent for too long.") from error
        except httpx.HTTPError as error:
            raise CommandError(f"The server at {self.url} hung up in the middle of an answer.") from error

    def _expect_success(self, response: httpx.Response) -> None:
        if response.status_code < 400:
            return
        hint = "Give its key with --api-key." if response.status_code in (401, 403) else ""
        raise CommandError(f"The server answered {response.status_code}: {_message(response.content)}", hint)

    def _stranger(self) -> CommandError:
        return CommandError(f"What answers at {self.url} does not speak the OpenAI API.", SERVER_HINT)


def _message(body: bytes) -> str:
    try:
        problem = read_chunk(body).error
    except msgspec.DecodeError:
        problem = None
    return problem.message if problem else "no reason was given."


def is_dragoman(url: str, key: str | None = None) -> bool:
    """Whether one of us answers there; a quick look that never raises."""
    try:
        with Client(url, key, timeout=LOOK_S) as client:
            return any(model.get("owned_by") == "dragoman" for model in client.models())
    except CommandError:
        return False
