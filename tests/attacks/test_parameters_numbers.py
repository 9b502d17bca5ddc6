"""Numbers that no field takes, in every field of every request that takes a number."""

import pytest
from msgspec import inspect

from dragoman.http.routes.table import POST
from tests.attacks.fields import PARTS, TYPES, Site, readers, sample, sites
from tests.attacks.frame import Frame

NUMBERS = sites(inspect.IntType, inspect.FloatType)
DIGITS = "1" * 5000
NO_NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "true",
    '"one"',
    '"1_0"',
    '"0x10"',
    "[1]",
    "{}",
    DIGITS,
    "-" + DIGITS,
]
TOO_MUCH = ["1e308", "-1e308", str(10**30), str(-(10**30)), str(2**64), str(-(2**63) - 1)]


def test_every_type_of_request_has_its_routes() -> None:
    assert set(readers()) == set(TYPES) | PARTS


def test_every_route_has_its_type() -> None:
    """Those that cancel something have no body, and two have a form."""
    routes = {route for routes in TYPES.values() for route in routes}
    forms = {"/v1/files", "/v1/uploads/{id}/parts"}
    others = {path for path in POST if path not in routes and not path.endswith("/cancel")}
    assert others == forms


@pytest.mark.parametrize("site", NUMBERS, ids=lambda site: site.type + site.place)
def test_every_number_has_its_bounds(site: Site) -> None:
    kind = site.kind
    assert isinstance(kind, inspect.IntType | inspect.FloatType)
    assert kind.ge is not None or kind.gt is not None
    assert kind.le is not None or kind.lt is not None


@pytest.mark.parametrize("site", NUMBERS, ids=lambda site: site.type + site.place)
def test_what_is_no_number_of_a_field_is_refused(frame: Frame, site: Site) -> None:
    """As the only thing that is wrong with it: with a good number the same body is read."""
    reader = readers()[site.type]
    for route in TYPES[site.type]:
        reader.decoder.decode(site.body(route, str(sample(site.kind))))
        for raw in [*NO_NUMBERS, DIGITS, *TOO_MUCH, *_beyond(site.kind)]:
            frame.refused(route, site.body(route, raw), status=(400,))


def _beyond(kind: inspect.Type) -> list[str]:
    """Just outside of the bounds; and, for an integer, between two."""
    assert isinstance(kind, inspect.IntType | inspect.FloatType)
    if isinstance(kind, inspect.IntType):
        assert kind.ge is not None and kind.le is not None
        return [str(kind.ge - 1), str(kind.le + 1), "1.5", "1e-3"]
    least = kind.gt if kind.ge is None else kind.ge - max(abs(kind.ge), 1) * 1e-6
    most = kind.lt if kind.le is None else kind.le + max(abs(kind.le), 1) * 1e-6
    return [str(least), str(most)]
