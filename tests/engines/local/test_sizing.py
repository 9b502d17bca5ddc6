"""How memory is shared out, and what the machine is taken to be."""

from pathlib import Path

import pytest

from dragoman.engines.local import machine
from dragoman.engines.local.machine import divide


@pytest.mark.parametrize(
    ("tokens", "trained", "slots", "context", "result"),
    [
        (90_000, 8192, None, None, (32, 2560)),
        (1_000_000, 8192, None, None, (32, 8192)),
        (20_000, 8192, None, None, (8, 2304)),
        (100, 8192, None, None, (1, 256)),
        (90_000, 512, None, None, (32, 512)),
        (90_000, 8192, 2, None, (2, 8192)),
        (90_000, 8192, None, 8192, (8, 8192)),
        (90_000, 8192, 64, 4096, (64, 4096)),
    ],
)
def test_divide(
    tokens: int, trained: int, slots: int | None, context: int | None, result: tuple[int, int]
) -> None:
    assert divide(tokens, trained, slots, context) == result


@pytest.mark.parametrize(
    ("tokens", "result"), [(90_000, (4, 8192)), (20_000, (2, 8192)), (10_000, (1, 8192)), (5_000, (1, 4864))]
)
def test_who_is_alone_has_few_slots_and_long_ones(tokens: int, result: tuple[int, int]) -> None:
    assert divide(tokens, 8192, None, None, most=4, room=8192) == result


def test_two_faces_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert machine.cores() == 2
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert machine.cores() == 1


def test_the_control_groups_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    assert machine.free_memory() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() > 1000
