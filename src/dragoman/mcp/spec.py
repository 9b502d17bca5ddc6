"""Types of this package: servers, tools, results, and the one failure."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from dragoman.limits import Limits
from dragoman.logs import clean
from dragoman.media import Media, media_part

Transport: TypeAlias = Literal["stdio", "http", "sse"]
FailureKind: TypeAlias = Literal["protocol", "http", "timeout", "unreachable"]

# Shorter values are not treated as secrets: masking them would damage every message.
SHORTEST_SECRET = 6


class McpServerSpec(Struct, frozen=True, kw_only=True):
    """One MCP server: a URL, or a process to start. Only the operator's file names processes."""

    label: str
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    authorization: str | None = None
    """A bare token, sent as `Authorization: Bearer`."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    transport: Transport | None = None
    """None tries Streamable HTTP, then the SSE of older servers."""
    only_public: bool = False
    """The operator has not named the host, so it must not resolve to an address of a private network."""

    def all_headers(self) -> dict[str, str]:
        bearer = {"Authorization": f"Bearer {self.authorization}"} if self.authorization else {}
        return {**self.headers, **bearer}

    def without_secrets(self, text: str) -> str:
        """Return `text` on one line of bounded length, with the server's secrets masked."""
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return str(clean(text))

    def _secrets(self) -> Iterator[str]:
        for value in (self.authorization or "", *self.headers.values(), *self.env.values()):
            # `Bearer abc` is a secret as a whole, and so is its last word: a server may quote either.
            yield from (part for part in (value, value.rpartition(" ")[2]) if len(part) >= SHORTEST_SECRET)

    def __repr__(self) -> str:
        return f"McpServerSpec({self.label!r})"


class McpTool(Struct, frozen=True):
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None
    """Annotations of the server: `readOnlyHint`, `destructiveHint`, ... They are claims, not facts."""

    @property
    def read_only(self) -> bool:
        return bool(self.annotations and self.annotations.get("readOnlyHint") is True)


class CallResult(Struct, frozen=True):
    text: str
    is_error: bool = False
    """The tool itself failed; `text` has the reason for the model."""
    parts: tuple[str | Media, ...] = ()
    """The content with media, which `text` only mentions."""


class McpLimits(Struct, frozen=True, kw_only=True):
    """Limits for one server."""

    connect_s: float = 20.0
    call_s: float = 60.0
    tools_age_s: float = 60.0
    """Seconds for which a list of tools is cached, unless the server reports a change."""
    tools: int = 512
    tools_bytes: int = 1024 * 1024
    answer_bytes: int = 1024 * 1024
    """Maximum bytes of one message."""
    result_chars: int = 512 * 1024
    limits: Limits = Limits()
    """Limits of media in results."""


class McpFailure(Exception):
    """A server that could not be reached or broke the protocol. This package raises no other exception."""

    def __init__(self, kind: FailureKind, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.code = code
        """The HTTP status, or the JSON-RPC error code."""

    @property
    def is_session_over(self) -> bool:
        """Whether the server no longer knows our session; it has then not executed the request."""
        return (self.kind, self.code) == ("http", 404)


def tell_result(outcome: CallResult | McpFailure) -> str | list[dict[str, Any]]:
    """Return the content of a call's result for the model."""
    if not isinstance(outcome, CallResult):
        return f"Error: {outcome.message}"
    if outcome.parts:
        return [
            {"type": "text", "text": part} if isinstance(part, str) else media_part(part)
            for part in outcome.parts
        ]
    return f"Error: {outcome.text}" if outcome.is_error else outcome.text


def shown_in(outcomes: Iterable[CallResult | McpFailure]) -> dict[str, Media]:
    results = (outcome for outcome in outcomes if isinstance(outcome, CallResult))
    return {part.key: part for each in results for part in each.parts if isinstance(part, Media)}
