"""What of a schema cannot be enforced, and where."""

from typing import Any

from msgspec import Struct

from dragoman.errors import BadRequest


class SchemaProblem(Struct, frozen=True):
    place: str
    """A JSON pointer: `/properties/a/pattern`; "" is the whole schema."""
    message: str
    """What is said after the place: "has \\b, which looks at what stands around it"."""

    def sentence(self, param: str) -> str:
        where = f"'{param}#{self.place}'" if self.place else f"'{param}'"
        return f"{where} {self.message}."


class Problems:
    """Those of one schema, as they are found."""

    def __init__(self) -> None:
        self.found: list[SchemaProblem] = []
        self.watched: list[str] = []
        """Places that no grammar can enforce, but a watch over the answer can; see `unique.py`."""
        self.exclusive: list[tuple[str, list[Any]]] = []
        """Options of which a value must fit exactly one, with their places."""

    def add(self, place: str, message: str) -> None:
        self.found.append(SchemaProblem(place, message))

    def check(self, param: str) -> None:
        """Raises with the first one, and says how many there are."""
        if self.found:
            first = self.found[0]
            more = f" There are {len(self.found) - 1} more like this." if len(self.found) > 1 else ""
            message = f"The schema cannot be enforced: {first.sentence(param)}{more}"
            raise BadRequest(
                message, param=f"{param}#{first.place}" if first.place else param, code="unsupported_schema"
            )


def at(place: str, *steps: str | int) -> str:
    """`at("/properties", "a/b")` is `/properties/a~1b`."""
    return place + "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)
