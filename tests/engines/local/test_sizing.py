"""How memory is shared out, and what the machine is taken to be."""

import os
from pathlib import Path

import pytest

from dragoman.engines.local import hardware
from dragoman.engines.local.gguf_model import GgufTensor
from dragoman.engines.local.hardware import split_kv_memory
from dragoman.engines.local.options import LocalOptions


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
    assert split_kv_memory(tokens, trained, slots, context) == result


@pytest.mark.parametrize(
    ("tokens", "result"), [(90_000, (4, 8192)), (20_000, (2, 8192)), (10_000, (1, 8192)), (5_000, (1, 4864))]
)
def test_who_is_alone_has_few_slots_and_long_ones(tokens: int, result: tuple[int, int]) -> None:
    assert split_kv_memory(tokens, 8192, None, None, most=4, room=8192) == result


Q4_0, Q4_1, Q8_0, Q4_K, Q6_K = 2, 3, 8, 12, 14


@pytest.mark.parametrize(
    ("weights", "options", "kinds", "wide"),
    [
        (1 << 30, LocalOptions(readers=8), [Q4_K, Q4_K, Q6_K], True),
        (1 << 30, LocalOptions(readers=8), [Q4_1], True),
        # Rows of the same weights are unpacked once more each, but there is no second product.
        (1 << 30, LocalOptions(readers=8), [Q4_0, Q4_0, Q6_K], False),
        (1 << 30, LocalOptions(readers=8), [Q4_0, Q4_0, Q4_1], False),
        (1 << 30, LocalOptions(readers=8), [Q8_0], True),
        (1 << 30, LocalOptions(slots=32), [Q4_K], True),
        (1 << 30, LocalOptions(), [Q4_K], False),
        (1 << 30, LocalOptions(slots=32, readers=1), [Q4_K], False),
        (3 << 30, LocalOptions(readers=8), [Q4_K], False),
    ],
)
def test_weights_are_wide_for_several_readers_where_there_is_room(
    weights: int,
    options: LocalOptions,
    kinds: list[int],
    wide: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [GgufTensor("", (32, 32), kind, 0) for kind in kinds]
    monkeypatch.setattr(hardware, "_whole_memory", lambda: 16 << 30)
    monkeypatch.setattr(hardware, "check_file", lambda path: tensors)
    (tmp_path / "model.gguf").touch()
    os.truncate(tmp_path / "model.gguf", weights)
    assert hardware.widens_to_int8(tmp_path / "model.gguf", options) == wide


def test_two_faces_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(hardware, "_CPUS", tmp_path)
    monkeypatch.setattr(hardware, "_GROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert hardware.cores() == 2
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert hardware.cores() == 1


def test_the_control_groups_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(hardware, "_GROUP", tmp_path)
    assert hardware.free_memory() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.free_memory() > 1000


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Only these are found, and each says its text."""
    for name, text in texts.items():
        program = folder / name.replace("_", "-")
        program.write_text(
            f"#!/bin/sh\ncase $1 in --query*) echo '{text}';; *) echo 'CUDA Version: 13.0';; esac\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    for name in ("_NVIDIA", "_AMD", "_ROCM", "_RENDERERS"):
        monkeypatch.setattr(hardware, name, folder / "none")


def test_a_gpu_is_found_by_its_drivers_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, nvidia_smi="NVIDIA L4")
    assert hardware.find_gpus() == [hardware.Gpu("cuda", "NVIDIA L4", (13, 0))]


def test_a_gpu_is_found_by_its_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch)
    assert hardware.find_gpus() == []
    (tmp_path / "gpus" / "0000").mkdir(parents=True)
    (tmp_path / "gpus" / "0000" / "information").write_text("Model: \t NVIDIA T4\n")
    monkeypatch.setattr(hardware, "_NVIDIA", tmp_path / "gpus")
    assert hardware.find_gpus() == [hardware.Gpu("cuda", "NVIDIA T4")]


def test_a_gpu_with_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch)
    (tmp_path / "version").write_text("7.2.4-97\n")
    monkeypatch.setattr(hardware, "_AMD", tmp_path)
    assert [gpu.kind for gpu in hardware.find_gpus()] == ["vulkan"]
    monkeypatch.setattr(hardware, "_ROCM", tmp_path / "version")
    assert hardware.find_gpus() == [hardware.Gpu("rocm", "an AMD GPU", (7, 2, 4))]


def test_a_mac_has_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert [gpu.kind for gpu in hardware.find_gpus()] == ["metal"]
