"""What the head of a reply tells: status, request id, limits."""

from collections.abc import Mapping

import httpx
from msgspec import Struct, field

_IDS = ("x-request-id", "request-id", "x-amzn-requestid", "cf-ray")
_ADVICE = {"true": True, "false": False}
_LIMITS = ("x-ratelimit-", "ratelimit-", "anthropic-ratelimit-")


class Reply(Struct, frozen=True, kw_only=True):
    status: int
    request_id: str | None = None
    """The server's name for this request, for its log."""
    rate_limits: Mapping[str, str] = field(default_factory=dict)
    """Every header about limits, by its name."""
    retry_after: float | None = None
    """Seconds after which the server wants to be asked again."""
    should_retry: bool | None = None
    """Whether the server says that asking again may help; None if it does not say."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, response: httpx.Response) -> "Reply":
        headers = dict(response.headers)
        return cls(
            status=response.status_code,
            request_id=next((headers[name] for name in _IDS if name in headers), None),
            rate_limits={name: value for name, value in headers.items() if name.startswith(_LIMITS)},
            retry_after=_seconds(headers),
            should_retry=_ADVICE.get(headers.get("x-should-retry", "")),
            headers=headers,
        )

    @property
    def streams(self) -> bool:
        return "text/event-stream" in self.headers.get("content-type", "")


def _seconds(headers: Mapping[str, str]) -> float | None:
    """A date in `retry-after` is left alone: it takes both clocks to be right."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.isascii() and text.replace(".", "", 1).isdigit():
            return float(text) * unit
    return None
