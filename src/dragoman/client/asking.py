"""What both clients have: how they are set up, and how an answer is asked for."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from dragoman.client import request as requests
from dragoman.client.request import Request
from dragoman.client.setup import Timeouts, setup_of

S = TypeVar("S")


class Asking(ABC, Generic[S]):
    """`S` is the stream that an answer comes in."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        key: str | None = None,
        *,
        timeouts: Timeouts | None = None,
        retries: int = 2,
        failures: str | Path | None = None,
    ) -> None:
        self._setup = setup_of(url, key, timeouts, retries, failures)
        self._connect(self._setup.options())

    @property
    def url(self) -> str:
        return self._setup.url

    @abstractmethod
    def _connect(self, options: dict[str, Any]) -> None:
        """Make the HTTP client, with these arguments."""

    @abstractmethod
    def stream(self, request: Request) -> S:
        """Nothing is sent before the stream is entered or read."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> S:
        return self.stream(requests.chat(messages, fields))

    def completions(self, prompt: str | Sequence[int], **fields: Any) -> S:
        return self.stream(requests.completions(prompt, fields))

    def responses(self, input: str | Sequence[Mapping[str, Any]], **fields: Any) -> S:
        return self.stream(requests.responses(input, fields))
