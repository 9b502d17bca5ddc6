"""How an API says what went wrong: its words for the parts of a request, and the shape of the body."""

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from dragoman.api.json_out import event
from dragoman.errors import DragomanError, EngineFailed, Part

FIELDS: Mapping[str, str] = {"reuse_prefix": "cache_prompt"}
"""What all requests for an answer name alike, but not as we do."""


class ErrorSpelling(Protocol):
    def body(self, error: DragomanError) -> Any:
        """The JSON of a reply that says so."""

    def event(self, error: Exception) -> bytes:
        """The last event of a stream that fails after its headers are gone."""


class OpenAIErrors(Struct, frozen=True):
    """OpenAI's shape. `words` are the fields in which the parts of a request come, where names differ."""

    words: Mapping[str, str] = {}

    def body(self, error: DragomanError) -> dict[str, dict[str, str | None]]:
        """All four keys are always there."""
        message, param = spelled(error, self.words)
        return {"error": {"message": message, "type": error.type, "param": param, "code": error.code}}

    def event(self, error: Exception) -> bytes:
        return event(self.body(known(error)))


def spelled(error: DragomanError, words: Mapping[str, str]) -> tuple[str, str | None]:
    """The message and the field that is meant, in an API's words.

    >>> spelled(BadRequest("'prompt' is empty.", param=Part("prompt")), {"prompt": "input"})
    ("'input' is empty.", 'input')
    """
    part = error.param
    if not isinstance(part, Part):
        return error.message, part
    word = str(words.get(part, part))
    return error.message.replace(f"'{part}'", f"'{word}'"), word


def known(error: Exception) -> DragomanError:
    """The error itself if it is one of ours: the words of others are for the log."""
    return error if isinstance(error, DragomanError) else EngineFailed("The server failed; see its log.")
