"""What the server promises whatever happens to it; `make torture` tries each with far more."""

from pathlib import Path

import pytest

from tests.attacks.frame import attacked
from tests.torture import determinism, kills, mixture, store_faults, utf8
from tests.torture.parts import BY_NAME, PAGE
from tests.torture.store_actions import ACTIONS

TORTURE = Path(mixture.__file__).parent
NO_SPACE, NOTHING_LEFT, *_ = store_faults.TROUBLES
STORED = (
    "a streamed response",
    "a response in the background",
    "a response in a conversation, with its ids",
    "a streamed chat completion",
)


def test_what_was_acknowledged_survives_kills_of_the_server(tmp_path: Path) -> None:
    seen = kills.killed(tmp_path, kills=2, seed=1)
    assert len(seen.texts) >= 2 * kills.LEAST
    assert seen.interrupted > 0
    assert (seen.lost, seen.torn, seen.damaged) == (0, 0, 0)


def test_a_lost_answer_would_be_noticed(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    with attacked(store="sqlite", data_dir=str(tmp_path)) as server:
        seen = kills.Observations()
        kills.compare(server, {"/v1/responses/resp_none": "text"}, seen)
        body = server.client.post("/v1/responses", json={"input": "one"}).json()
        kills.compare(server, {f"/v1/responses/{body['id']}": "other"}, seen)
    assert (seen.lost, seen.torn) == (1, 1)


@pytest.mark.parametrize("trouble", [NO_SPACE, NOTHING_LEFT], ids=lambda trouble: trouble.name)
def test_whichever_statement_of_the_store_fails_nothing_untrue_is_told(trouble: store_faults.Trouble) -> None:
    count = store_faults.tried(trouble, {name: ACTIONS[name] for name in STORED})
    assert count.failures > 10 * len(STORED)
    assert (count.untrue, count.unclear) == ([], [])


def test_nothing_is_held_of_requests_of_every_kind() -> None:
    seen = mixture.run_mixture(requests=600, samples=3, seed=1)
    _, before, after = seen.states
    assert seen.failed == 0
    assert {200, 400} <= set(seen.statuses)
    assert after.live == 0
    assert after.tasks <= before.tasks
    assert after.descriptors <= before.descriptors


def test_one_seed_gives_one_log_of_events() -> None:
    first = determinism.log(200, seed=1)
    assert first == determinism.log(200, seed=1)
    assert first != determinism.log(200, seed=2)


def test_characters_come_whole_wherever_they_are_cut() -> None:
    assert all(row.passed for row in utf8.run(0.002))


def test_every_module_of_torture_is_a_part_of_the_page() -> None:
    modules = {file.stem for file in TORTURE.glob("*.py") if "\ndef run(" in file.read_text()}
    assert modules | {"vllm_trajectories"} == {*PAGE, *BY_NAME}
