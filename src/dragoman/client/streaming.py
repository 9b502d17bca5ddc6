"""What a stream of either client has besides its way to read from a socket."""

from pathlib import Path

from dragoman.client import failures
from dragoman.client.answer import AnswerTree
from dragoman.client.failures import Outcome
from dragoman.client.problems import ClientError
from dragoman.client.reading import Reading
from dragoman.client.reply import Reply
from dragoman.client.request import Request
from dragoman.client.setup import Setup
from dragoman.types import Usage


class StreamState:
    def __init__(self, setup: Setup, request: Request) -> None:
        self._setup = setup
        self._reading = Reading(setup, request)
        self._begun = False

    @property
    def reply(self) -> Reply | None:
        """Status, request id and limits, once the head of the reply has come."""
        return self._reading.reply

    @property
    def answers(self) -> list[AnswerTree]:
        """The answers so far, one for each choice."""
        return self._reading.fold.answers

    @property
    def usage(self) -> Usage | None:
        return self._reading.fold.usage

    def outcome(self, error: ClientError | None = None) -> Outcome:
        return failures.outcome_of(self._reading, self._setup, error)

    def save(self, folder: str | Path) -> Path:
        """Keep the request and what came of it: `dragoman replay` shows what another try brings."""
        return failures.save(Path(folder), self._reading, self._setup, None)

    def _begin(self) -> None:
        if self._begun:
            raise RuntimeError("This stream has been read; ask again for another one.")
        self._begun = True

    def _failed(self, error: ClientError) -> None:
        """Keep it, once: the way out may lead through several places."""
        if self._setup.failures is not None and error.saved is None:
            error.saved = failures.save(self._setup.failures, self._reading, self._setup, error)

    def _first(self) -> AnswerTree:
        answers = self.answers
        return answers[0] if answers else AnswerTree()
