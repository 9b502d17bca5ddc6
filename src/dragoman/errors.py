"""Every error a person can meet, in one tree. Each knows its HTTP status, type and code.

    DragomanError                 500  server_error
    ├── BadRequest                400  invalid_request_error
    │   ├── ContextOverflow       400  invalid_request_error   context_length_exceeded
    │   ├── TemplateError         400  invalid_request_error   template_error
    │   │   └── EndlessTemplate   400  invalid_request_error   template_error
    │   ├── UnknownField          400  invalid_request_error   unknown_field
    │   ├── UnknownCursor         400  invalid_request_error   unknown_cursor
    │   └── ChainTooLong          400  invalid_request_error   limit_exceeded
    ├── Unauthorized              401  authentication_error    invalid_api_key
    ├── Forbidden                 403  permission_error
    ├── NotFound                  404  not_found_error
    │   ├── ModelNotFound         404  not_found_error         model_not_found
    │   └── MissingRecord         404  not_found_error         record_not_found
    ├── MethodNotAllowed          405  invalid_request_error   method_not_allowed
    ├── TooSlow                   408  invalid_request_error   request_timeout
    ├── DeadlineExceeded          408  timeout_error           timeout
    ├── Conflict                  409  invalid_request_error   conflict
    ├── BodyTooLarge              413  invalid_request_error   body_too_large
    ├── UnsupportedMedia          415  invalid_request_error   unsupported_media_type
    ├── Overloaded                429  rate_limit_error        overloaded
    │   └── ServerFull            429  rate_limit_error        overloaded
    ├── HeadTooLarge              431  invalid_request_error   head_too_large
    ├── EngineFailed              500  server_error            engine_failed
    │   └── ConstraintFailed      500  server_error            constraint_failed
    ├── UnfitAnswer               500  server_error            unfit_answer
    ├── Unavailable               503  server_error            unavailable
    │   ├── Loading               503  server_error            loading
    │   └── StoreUnavailable      503  server_error            store_unavailable
    ├── SettingsError             (command line) a setting is wrong
    ├── ModelFileError            (loading)      a model file cannot be used
    └── BindingError              (loading)      the native library does not fit

A message is safe to show: it says what to change, and never carries the text of a foreign exception. What is
wrong is a `Part` of what was asked; the name of its field, and the shape of the body, are for an API to say
(`src/dragoman/api/reply.py`).
"""

import traceback
from collections.abc import Sequence
from typing import ClassVar

LONGEST_MESSAGE = 2048
LONGEST_PARAM = 256


class Part(str):
    """A part of what was asked, by our own name. Any field of `Sampling` is one.

    Each API has a word for it, and writes that wherever a message has the name in quotes.
    """

    __slots__ = ()


CONVERSATION = Part("conversation")
"""What was said so far."""
PROMPT = Part("prompt")
"""A text, or ids, to go on from."""
TOOLS = Part("tools")
TOOL_CHOICE = Part("tool_choice")
OUTPUT = Part("output")
"""What the text of the answer must be."""
MODEL = Part("model")
ADAPTERS = Part("lora")
ADAPTER_NAME, ADAPTER_PATH = Part("lora_name"), Part("lora_path")
"""Of one that is to be loaded."""
ANSWERS = Part("n")
"""How many."""
STOP = Part("stop")
LOGPROBS = Part("logprobs")
"""Whether log probabilities are told."""
ALTERNATIVES = Part("alternatives")
"""How many ids are told beside each that was chosen."""
TEMPLATE = Part("chat_template")
TEMPLATE_KWARGS = Part("chat_template_kwargs")
FINAL_MESSAGE = Part("continue_final_message")
"""That the last message is to be continued."""
SUFFIX = Part("suffix")
AFTER = Part("after")
"""Which entry a page of a list comes after."""


def shorten(text: str, most: int) -> str:
    """Both ends of a long text: what a client sent may stand in an error, but not all of it."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def is_near(name: str, other: str) -> bool:
    """Whether one is a slip of the other: one place of one letter or two, or `-`, `_` and large letters.

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
    """Seconds after which to try again, where that may help."""
    should_retry: ClassVar[bool | None] = None
    """Told to clients that would go by the status and be wrong."""

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
        """The field that is wrong, where an API has said so in its words; else the part."""
        if code is not None:
            self.code = code
        if retry_after is not None:
            self.retry_after = retry_after

    def let_go(self) -> None:
        """Frees what was made of a request, which the frames of the traceback hold."""
        traceback.clear_frames(self.__traceback__)


class BadRequest(DragomanError):
    status = 400
    type = "invalid_request_error"


class ContextOverflow(BadRequest):
    # Codex and opencode start compaction only on this code. LiteLLM, and others, look for OpenAI's words.
    code = "context_length_exceeded"
    tokens: int | str = ""
    most = 0
    """What the prompt has, and what it may have."""

    @classmethod
    def of(cls, tokens: int | str, most: int, param: str | None = None) -> "ContextOverflow":
        """A prompt that has so many tokens, where it may have at most so many."""
        message = (
            f"This model's maximum context length is {most} tokens for a prompt. However, "
            f"this one has {tokens} tokens; shorten it."
        )
        error = cls(message, param=param)
        error.tokens, error.most = tokens, most
        return error


class TemplateError(BadRequest):
    code = "template_error"


class EndlessTemplate(TemplateError):
    """Its rendering was stopped because it cost too much."""


class UnknownField(BadRequest):
    code = "unknown_field"


class UnknownCursor(BadRequest):
    """A page after an entry that is not in the list."""

    code = "unknown_cursor"

    def __init__(self, after: str) -> None:
        super().__init__(f"There is no {after} in this list to go on after.", param=AFTER)


class ChainTooLong(BadRequest):
    """A record that continues more records than may be read for it."""

    code = "limit_exceeded"

    def __init__(self, most: int) -> None:
        super().__init__(f"This continues more than {most} others; begin anew, with what is needed of them.")


class TrajectoryTooLarge(BadRequest):
    """More ids than may be read for one request."""

    code = "limit_exceeded"

    def __init__(self) -> None:
        super().__init__("This trajectory is too large for a reply; `dragoman export` writes it to a file.")


class Unauthorized(DragomanError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(DragomanError):
    """Asked in a name, or by a web page, that this server does not answer to."""

    status = 403
    type = "permission_error"


class NotFound(DragomanError):
    status = 404
    type = "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MissingRecord(NotFound):
    """A record that another one continues is not stored, or not any more."""

    code = "record_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(
            f"{id} is not stored: it never was, or it was deleted, or it was dropped to make room."
        )
        self.id = id


class MethodNotAllowed(DragomanError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed
        """The methods that there are."""


class TooSlow(DragomanError):
    """A request that was not there in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class DeadlineExceeded(DragomanError):
    """The time that the client, or the server's owner, gives an answer is over."""

    status = 408
    type = "timeout_error"
    code = "timeout"
    # OpenAI's clients try again on a 408, which would only take as long again.
    should_retry = False


class Conflict(DragomanError):
    """What was to be changed is not what it was when it was read."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class BodyTooLarge(DragomanError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMedia(DragomanError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class HeadTooLarge(DragomanError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class Overloaded(DragomanError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after = 1


class ServerFull(Overloaded):
    """It is not this client who asks for too much: there is no room for anybody."""


class EngineFailed(DragomanError):
    code = "engine_failed"


class ConstraintFailed(EngineFailed):
    """What may come next under a constraint cannot be said: the answer ends rather than go on without it."""

    code = "constraint_failed"


class UnfitAnswer(DragomanError):
    """What the model wrote is not what was asked for, each time, on an engine that cannot be held to it."""

    code = "unfit_answer"
    # It was asked several times: OpenAI's clients would have it asked several times as often.
    should_retry = False


class Unavailable(DragomanError):
    status = 503
    code = "unavailable"
    retry_after = 1


class Loading(Unavailable):
    """The model is not there yet."""

    code = "loading"


class StoreUnavailable(Unavailable):
    """The database cannot be read or written now; nothing of the request was stored."""

    code = "store_unavailable"


class SettingsError(DragomanError):
    """A setting that cannot be used; the message names it and says what it may be."""


class ModelFileError(DragomanError):
    """A model file that is missing, damaged or of a kind we cannot run."""


class BindingError(DragomanError):
    """The native library is missing or its layout is not the one that was declared."""
