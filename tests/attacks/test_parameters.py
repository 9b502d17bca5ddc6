"""Numbers and counts that no request may have."""

import pytest

from tests.attacks.bodies import GOOD, OVER, changed, good, undeclared
from tests.attacks.frame import Frame


def test_every_route_that_takes_a_body_is_attacked() -> None:
    assert not undeclared()


@pytest.mark.parametrize("route", sorted(GOOD))
def test_the_good_body_is_good(frame: Frame, route: str) -> None:
    """Otherwise an attack would be refused for another reason."""
    reply = frame.sent(route, good(route))
    assert reply.status == 200 or route in OVER, reply


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_huge_n_is_refused(frame: Frame, route: str) -> None:
    assert frame.refused(route, changed(route, "n", 10**9))["param"] == "n"
