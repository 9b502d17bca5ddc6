"""More than there is room for: refused at once, and the rest is answered. Small ones of what torture does."""

import asyncio

from tests.attacks.frame import attacked
from tests.torture import bleed, overload


def test_a_flood_is_refused_and_the_rest_is_answered() -> None:
    with attacked(interval=0.01, limits={"in_flight": 4, "queue": 4}) as server:
        load = asyncio.run(overload.flood(server, seconds=1, rate=60))
        assert set(load.statuses) == {200, 429}
        assert load.unadvised == 0
        reply = server.client.get("/metrics").text
        assert f'dragoman_refused_total{{reason="queue"}} {float(load.statuses[429])}' in reply
        assert 'dragoman_answers_running{model="parrot"} 0.0' in reply
        assert server.state().live == 0


def test_no_answer_holds_a_word_of_another() -> None:
    """Though all of them have the same request id."""
    with attacked(interval=0.002) as server:
        count = asyncio.run(bleed.listen(server, clients=60, seconds=0, seed=3))
    assert (count.answers, count.wrong) == (60, 0)
