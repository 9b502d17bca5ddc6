"""What goes wrong, as Responses says it: in a reply, in a stream, and on a socket."""

from typing import Any

from dragoman.api.error_spelling import FIELDS, OpenAIErrors, known
from dragoman.api.sse import encode
from dragoman.errors import ALTERNATIVES, CONVERSATION, LOGPROBS, OUTPUT, PROMPT, DragomanError


class ResponseErrors(OpenAIErrors, frozen=True):
    def message(self, error: DragomanError) -> dict[str, Any]:
        """Flat for one generation of SDKs, nested for the other; Codex reads the status."""
        said = self.body(error)
        flat = {key: value for key, value in said["error"].items() if key != "type"}
        return {"type": "error", "sequence_number": 0, "status": error.status, **flat, **said}

    def event(self, error: Exception) -> bytes:
        return b"event: error\ndata: " + encode(self.message(known(error))) + b"\n\n"


ERRORS = ResponseErrors(
    {
        **FIELDS,
        CONVERSATION: "input",
        PROMPT: "input",
        OUTPUT: "text.format",
        LOGPROBS: "include",
        ALTERNATIVES: "top_logprobs",
    }
)
