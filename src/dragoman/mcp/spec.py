"""What the room is asked and what it answers: servers, tools, results and the one failure."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from dragoman.limits import Limits
from dragoman.logs import clean
from dragoman.media import Media, tell_media

Transport: TypeAlias = Literal["stdio", "http", "sse"]
FailureKind: TypeAlias = Literal["protocol", "http", "timeout", "unreachable"]

# A shorter value is no secret, and to blank it out would make holes in every message.
SHORTEST_SECRET = 6


class ServerSpec(Struct, frozen=True, kw_only=True):
    """One MCP server: an address, or a process to start. Only the operator's file names processes."""

    label: str
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    authorization: str | None = None
    """A bare token; it is sent as `Authorization: Bearer`."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    transport: Transport | None = None
    """None tries Streamable HTTP, then the SSE of older servers."""
    only_public: bool = False
    """Nobody has named the host, so it may not stand for an address of a private network."""

    def all_headers(self) -> dict[str, str]:
        bearer = {"Authorization": f"Bearer {self.authorization}"} if self.authorization else {}
        return {**self.headers, **bearer}

    def without_secrets(self, text: str) -> str:
        """`text` on one line, of bounded length; what the server was told in confidence is blanked out."""
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return str(clean(text))

    def _secrets(self) -> Iterator[str]:
        for value in (self.authorization or "", *self.headers.values(), *self.env.values()):
            # `Bearer abc` is a secret as a whole and in its last word: a server may quote either.
            yield from (part for part in (value, value.rpartition(" ")[2]) if len(part) >= SHORTEST_SECRET)

    def __repr__(self) -> str:
        return f"ServerSpec({self.label!r})"


class McpTool(Struct, frozen=True):
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None
    """As the server wrote them: `readOnlyHint`, `destructiveHint`, ... They are claims, not facts."""

    @property
    def read_only(self) -> bool:
        return bool(self.annotations and self.annotations.get("readOnlyHint") is True)


class CallResult(Struct, frozen=True):
    text: str
    is_error: bool = False
    """The tool itself failed; `text` tells the model why."""
    parts: tuple[str | Media, ...] = ()
    """The same where it shows or plays something, which `text` only mentions."""


class McpBounds(Struct, frozen=True, kw_only=True):
    """What one server may cost."""

    connect_s: float = 20.0
    call_s: float = 60.0
    tools_age_s: float = 60.0
    """A list of tools is asked for again after this time, even if the server told of no change."""
    tools: int = 512
    tools_bytes: int = 1024 * 1024
    answer_bytes: int = 1024 * 1024
    """Bytes of one message of the server, of whatever they are."""
    result_chars: int = 512 * 1024
    limits: Limits = Limits()
    """Those of pictures and sounds in results."""


class McpFailure(Exception):
    """A server that could not be reached or answered badly. Nothing else leaves this room."""

    def __init__(self, kind: FailureKind, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.code = code
        """The HTTP status, or the code of the JSON-RPC error."""

    @property
    def is_session_over(self) -> bool:
        """The server does not know our session any more; what it was asked, it has not done."""
        return (self.kind, self.code) == ("http", 404)


def tell_result(outcome: CallResult | McpFailure) -> str | list[dict[str, Any]]:
    """What the model reads as the result of a call, and sees."""
    if not isinstance(outcome, CallResult):
        return f"Error: {outcome.message}"
    if outcome.parts:
        return [
            {"type": "text", "text": part} if isinstance(part, str) else tell_media(part)
            for part in outcome.parts
        ]
    return f"Error: {outcome.text}" if outcome.is_error else outcome.text


def shown_in(outcomes: Iterable[CallResult | McpFailure]) -> dict[str, Media]:
    results = (outcome for outcome in outcomes if isinstance(outcome, CallResult))
    return {part.key: part for each in results for part in each.parts if isinstance(part, Media)}
