"""All errors that users see, in one tree, each with its HTTP status, type and code.

    DragomanError                 500  server_error
    ├── BadRequest                400  invalid_request_error
    │   ├── ContextOverflow       400  invalid_request_error   context_length_exceeded
    │   ├── TemplateError         400  invalid_request_error   template_error
    │   │   └── TemplateBudgetExceeded   400  invalid_request_error   template_error
    │   ├── UnknownField          400  invalid_request_error   unknown_field
    │   ├── UnknownCursor         400  invalid_request_error   unknown_cursor
    │   └── ChainTooLong          400  invalid_request_error   limit_exceeded
    ├── Unauthorized              401  authentication_error    invalid_api_key
    ├── Forbidden                 403  permission_error
    ├── NotFound                  404  not_found_error
    │   ├── ModelNotFound         404  not_found_error         model_not_found
    │   └── RecordNotFound         404  not_found_error         record_not_found
    ├── MethodNotAllowed          405  invalid_request_error   method_not_allowed
    ├── RequestTimeout                   408  invalid_request_error   request_timeout
    ├── DeadlineExceeded          408  timeout_error           timeout
    ├── Conflict                  409  invalid_request_error   conflict
    ├── BodyTooLarge              413  invalid_request_error   body_too_large
    ├── UnsupportedMediaType          415  invalid_request_error   unsupported_media_type
    ├── Overloaded                429  rate_limit_error        overloaded
    │   └── ServerFull            429  rate_limit_error        overloaded
    ├── HeadersTooLarge              431  invalid_request_error   head_too_large
    ├── EngineFailed              500  server_error            engine_failed
    │   └── ConstraintFailed      500  server_error            constraint_failed
    ├── InvalidAnswer               500  server_error            unfit_answer
    ├── Unavailable               503  server_error            unavailable
    │   ├── Loading               503  server_error            loading
    │   └── StoreUnavailable      503  server_error            store_unavailable
    ├── SettingsError             (command line) a setting is wrong
    ├── ModelFileError            (loading)      a model file cannot be used
    └── BindingError              (loading)      the native library does not fit

A message is safe to show: it says what to change, and never contains the text of a foreign exception. `param`
is a `ParamKey`, our own name of the field that is wrong; each API replaces it by its own name of that field
and formats the error in its own JSON (`src/dragoman/api/reply.py`).
"""

import traceback
from collections.abc import Sequence
from typing import ClassVar

LONGEST_MESSAGE = 2048
LONGEST_PARAM = 256


class ParamKey(str):
    """Our own name of a request field; every field of `Sampling` is one.

    Each API replaces it by its own field name, in `param` and wherever a message has the name in quotes.
    """

    __slots__ = ()


CONVERSATION = ParamKey("conversation")
"""The messages so far."""
PROMPT = ParamKey("prompt")
"""The text or ids to complete."""
TOOLS = ParamKey("tools")
TOOL_CHOICE = ParamKey("tool_choice")
OUTPUT = ParamKey("output")
"""The format that the answer's text must have."""
MODEL = ParamKey("model")
ADAPTERS = ParamKey("lora")
ADAPTER_NAME, ADAPTER_PATH = ParamKey("lora_name"), ParamKey("lora_path")
"""Name and file of an adapter to load."""
CHOICE_COUNT = ParamKey("n")
"""The number of answers."""
STOP = ParamKey("stop")
LOGPROBS = ParamKey("logprobs")
"""Whether to report log probabilities."""
TOP_LOGPROBS = ParamKey("alternatives")
"""How many alternatives to report for each sampled id."""
TEMPLATE = ParamKey("chat_template")
TEMPLATE_KWARGS = ParamKey("chat_template_kwargs")
FINAL_MESSAGE = ParamKey("continue_final_message")
"""Whether the answer continues the last message."""
SUFFIX = ParamKey("suffix")
CURSOR = ParamKey("after")
"""The entry after which a page of a list begins."""


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a long text: an error may quote what a client sent, but not at full length."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def is_typo_of(name: str, other: str) -> bool:
    """Whether one name is likely a typo of the other: one or two letters differ at one position, or only `-`,
    `_` and case do.

    >>> is_near("temprature", "temperature"), is_near("topP", "top_p"), is_near("format", "lora")
    (True, True, False)
    """
    shorter, longer = sorted((len(name), len(other)))
    if longer - shorter > 2 or shorter < 4:
        return False
    if _plain(name) == _plain(other):
        return True
    start = next((at for at in range(shorter) if name[at] != other[at]), shorter)
    end = next((at for at in range(shorter - start) if name[-1 - at] != other[-1 - at]), shorter - start)
    here, there = name[start : len(name) - end], other[start : len(other) - end]
    return max(len(here), len(there)) <= (1 if shorter < 6 else 2) or (len(here) == 2 and here == there[::-1])


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


class DragomanError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    retry_after: int | None = None
    """Seconds after which the client should retry, if a retry may help."""
    should_retry: ClassVar[bool | None] = None
    """Sent to clients as a header where deciding by the status alone would be wrong."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        message = shorten(message, LONGEST_MESSAGE)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else shorten(param, LONGEST_PARAM)
        """The field that is wrong, as an API names it, or a `ParamKey`."""
        if code is not None:
            self.code = code
        if retry_after is not None:
            self.retry_after = retry_after

    def clear_frames(self) -> None:
        """Free the parsed request, which the frames of the traceback keep alive."""
        traceback.clear_frames(self.__traceback__)


class BadRequest(DragomanError):
    status = 400
    type = "invalid_request_error"


class ContextOverflow(BadRequest):
    # Codex and opencode start compaction only on this code; LiteLLM and others search for OpenAI's wording.
    code = "context_length_exceeded"
    tokens: int | str = ""
    most = 0
    """The number of tokens in the prompt, and the maximum."""

    @classmethod
    def of(cls, tokens: int | str, most: int, param: str | None = None) -> "ContextOverflow":
        """Return the error for a prompt of `tokens` tokens where at most `most` are allowed."""
        message = (
            f"This model's maximum context length is {most} tokens for a prompt. However, "
            f"this one has {tokens} tokens; shorten it."
        )
        error = cls(message, param=param)
        error.tokens, error.most = tokens, most
        return error


class TemplateError(BadRequest):
    code = "template_error"


class TemplateBudgetExceeded(TemplateError):
    """Template rendering that was stopped because it cost too much."""


class UnknownField(BadRequest):
    code = "unknown_field"


class UnknownCursor(BadRequest):
    """A requested page begins after an entry that is not in the list."""

    code = "unknown_cursor"

    def __init__(self, after: str) -> None:
        super().__init__(f"{after} is not in this list; continue after an id that is.", param=CURSOR)


class ChainTooLong(BadRequest):
    """A chain of responses that is longer than may be read for one request."""

    code = "limit_exceeded"

    def __init__(self, most: int) -> None:
        super().__init__(
            f"The chain is longer than {most} responses; start a new one with the context it needs."
        )


class TrajectoryTooLarge(BadRequest):
    """A trajectory with more ids than one reply may have."""

    code = "limit_exceeded"

    def __init__(self) -> None:
        super().__init__("This trajectory is too large for a reply; `dragoman export` writes it to a file.")


class Unauthorized(DragomanError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(DragomanError):
    """The Host or Origin of the request is not allowed, or its key lacks the right."""

    status = 403
    type = "permission_error"


class NotFound(DragomanError):
    status = 404
    type = "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class RecordNotFound(NotFound):
    """A stored record that another one continues does not exist, or no longer."""

    code = "record_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"{id} is not stored: it never was, or it was deleted, or evicted to free space.")
        self.id = id


class MethodNotAllowed(DragomanError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed
        """The allowed methods."""


class RequestTimeout(DragomanError):
    """The request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class DeadlineExceeded(DragomanError):
    """The answer took longer than the client or the operator allows."""

    status = 408
    type = "timeout_error"
    code = "timeout"
    # OpenAI's clients retry after a 408, and the retry would take as long.
    should_retry = False


class Conflict(DragomanError):
    """The record changed after it was read."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class BodyTooLarge(DragomanError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(DragomanError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class HeadersTooLarge(DragomanError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class Overloaded(DragomanError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after = 1


class ServerFull(Overloaded):
    """The server is at capacity, which is not the fault of this client."""


class EngineFailed(DragomanError):
    code = "engine_failed"


class ConstraintFailed(EngineFailed):
    """The constraint cannot compute which ids may follow; the answer ends rather than continue without it."""

    code = "constraint_failed"


class InvalidAnswer(DragomanError):
    """Every attempt of the model failed the check, on an engine that cannot constrain its output."""

    code = "unfit_answer"
    # The server has retried already; retries by OpenAI's clients would multiply the attempts.
    should_retry = False


class Unavailable(DragomanError):
    status = 503
    code = "unavailable"
    retry_after = 1


class ModelLoading(Unavailable):
    """The model is still being loaded."""

    code = "loading"


class StoreUnavailable(Unavailable):
    """The database cannot be read or written now; nothing of the request was stored."""

    code = "store_unavailable"


class SettingsError(DragomanError):
    """A setting that cannot be used; the message names it and the allowed values."""


class ModelFileError(DragomanError):
    """A model file that is missing, damaged or of an unsupported format."""


class BindingError(DragomanError):
    """The native library is missing, or its layout differs from the declared one."""
