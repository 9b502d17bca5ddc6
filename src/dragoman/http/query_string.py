"""The query string of a request."""

from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict
from urllib.parse import parse_qsl

from dragoman.errors import BadRequest

if TYPE_CHECKING:
    from dragoman.http.exchange import Exchange

Order: TypeAlias = Literal["asc", "desc"]
LONGEST_PAGE = 100
USUAL_PAGE = 20


class PageParams(TypedDict):
    """A page of a list, in the store's parameters."""

    after: str | None
    limit: int
    descending: bool


class QueryString:
    def __init__(self, exchange: "Exchange") -> None:
        raw = exchange.scope.get("query_string", b"")
        try:
            pairs = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=128)
        except ValueError:
            raise BadRequest(
                "The query string is not valid; send at most 128 fields in UTF-8.", code="invalid_value"
            ) from None
        self._pairs = pairs
        self._given = dict(pairs)

    def text(self, name: str) -> str | None:
        return self._given.get(name)

    def texts(self, name: str) -> list[str]:
        """Return all values: `include=a&include[]=b` has `["a", "b"]`."""
        return [value for key, value in self._pairs if key in (name, f"{name}[]")]

    def flag(self, name: str) -> bool:
        result = self._given.get(name, "false").lower()
        if result not in ("true", "false", "1", "0", ""):
            raise _wrong(name, "must be true or false")
        return result in ("true", "1")

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        value = self._given.get(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 16 and least <= int(value) <= most):
            raise _wrong(name, f"must be an integer from {least} to {most}")
        return int(value)

    def pairs(self, name: str) -> dict[str, str]:
        """Return pairs: `metadata[a]=b` is `{"a": "b"}`."""
        start = f"{name}["
        return {
            key[len(start) : -1]: value
            for key, value in self._given.items()
            if key.startswith(start) and key.endswith("]")
        }

    def page_params(self, default: Order, usual: int = USUAL_PAGE, longest: int = LONGEST_PAGE) -> PageParams:
        order: str = self._given.get("order", default)
        if order not in ("asc", "desc"):
            raise _wrong("order", "must be asc or desc")
        limit = self.integer("limit", usual, 1, longest)
        return PageParams(after=self.text("after"), limit=limit, descending=order == "desc")


def _wrong(name: str, what: str) -> BadRequest:
    return BadRequest(f"'{name}' {what}.", param=name, code="invalid_value")
