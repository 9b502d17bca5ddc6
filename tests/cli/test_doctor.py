import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.cli import checks, doctor, main
from dragoman.cli.checks import CheckContext, Finding
from dragoman.engines.local import hardware
from dragoman.engines.local.binding import PINNED, GpuDevice, Library
from dragoman.engines.local.hardware import Gpu
from dragoman.errors import BindingError
from dragoman.settings import Settings
from tests.cli.conftest import Fake

Capture = pytest.CaptureFixture[str]
SMALL = ["--slots", "1", "--context", "256", "--port", "0"]


def examine(capsys: Capture, *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json", *SMALL, *flags])
    return code, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_healthy_machine(weights: Path, capsys: Capture) -> None:
    code, fields = examine(capsys, "--full")
    assert code == 0
    assert {finding["verdict"] for finding in fields.values()} <= {"ok", "warning"}
    assert "checksum correct" in fields["weights"]["text"]
    assert fields["speech"]["text"].startswith("8 tokens")
    assert set(fields) >= {
        "settings",
        "python",
        "packages",
        "binding",
        "processor",
        "memory",
        "cache",
        "requests",
        "template",
    }


def test_what_is_wrong_is_shown_with_what_to_do(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("DRAGOMAN_SLOTS", "many")
    assert main(["doctor", "--port", "0"]) == 1
    text = capsys.readouterr().out
    assert "✗ settings" in text
    assert "slots" in text
    assert "! weights" in text
    assert "→ `dragoman serve` downloads them" in text
    assert "✓ python" in text


def test_what_is_set_for_all_requests_is_looked_at() -> None:
    [finding] = doctor.attempt(checks.requests, CheckContext(Settings(override={"n": 2})))
    assert (finding.verdict, "`override`" in finding.text) == ("failed", True)


def test_a_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def found(folder: Path) -> Finding:
        [finding] = doctor.attempt(checks.data, CheckContext(Settings(data_dir=str(folder))))
        return finding

    assert found(tmp_path / "file" / "data").verdict == "failed"
    assert found(tmp_path / "file").verdict == "failed"
    assert found(tmp_path / "new" / "data").verdict == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_damaged_file(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: Path
) -> None:
    (tmp_path / weights.name).write_bytes(b"GGUF but short")
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path))
    code, fields = examine(capsys)
    assert code == 1
    assert fields["weights"]["verdict"] == "failed"
    assert "Delete" in fields["weights"]["advice"]
    assert fields["model"]["verdict"] == "failed"


def test_a_port_that_is_taken(fake: Fake, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = CheckContext(Settings(port=int(fake.url.rpartition(":")[2])))
    (finding,) = checks.port(patient)
    assert finding.verdict == "warning"
    assert "another dragoman" in finding.text


def failing(_: CheckContext) -> Iterator[Finding]:
    raise BindingError("It does not fit.")


def breaking(_: CheckContext) -> Iterator[Finding]:
    raise ValueError("SECRET")
    yield


def test_a_check_that_breaks_does_not_end_the_visit() -> None:
    patient = CheckContext(Settings())
    (ours,) = doctor.attempt(failing, patient)
    assert (ours.verdict, ours.text) == ("failed", "It does not fit.")
    (foreign,) = doctor.attempt(breaking, patient)
    assert foreign.text == "the check failed: ValueError"


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PACKAGES", ("msgspec", "no-such-package"))
    missing, rest = checks.packages(CheckContext(Settings()))
    assert (missing.verdict, missing.advice) == ("failed", "pip install no-such-package")
    assert rest.text.startswith("msgspec ")


def test_what_a_cpu_is(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A 9\nflags\t\t: fpu avx2\n")
    assert hardware.cpu_name(tmp_path / "cpuinfo") == "A 9"
    assert hardware.cpu_name(tmp_path / "gone") == ""
    assert hardware.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2"}
    assert hardware.cpu_flags(tmp_path / "gone") == frozenset()


@pytest.mark.parametrize(
    ("found", "wheel"),
    [
        (Gpu("cuda", "NVIDIA H200", (13, 2)), "/cu132"),
        (Gpu("cuda", "NVIDIA H200", (13, 0)), "/cu128"),
        (Gpu("cuda", "an old one", (11, 8)), "/vulkan"),
        (Gpu("rocm", "Radeon", (7, 2, 4)), "/rocm-7.2.4"),
        (Gpu("rocm", "Radeon", (6, 4, 1)), "/rocm-6.4.1"),
        (Gpu("vulkan", "Arc"), "/vulkan"),
        (Gpu("metal", "arm"), f"xllamacpp=={PINNED}"),
    ],
)
def test_a_gpu_that_is_not_used_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, found: Gpu, wheel: str
) -> None:
    monkeypatch.setattr(hardware, "find_gpus", lambda: [found])
    [finding] = checks.gpu(CheckContext(Settings()))
    assert finding.verdict == "warning" and found.name in finding.text
    assert finding.advice.endswith(wheel)


def test_a_gpu_that_llama_cpp_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = GpuDevice("CUDA0", "NVIDIA H200", 150 << 30)
    monkeypatch.setattr(Library, "gpus", lambda self: [device])
    [finding] = checks.gpu(CheckContext(Settings()))
    assert (finding.verdict, finding.text) == (
        "ok",
        "llama.cpp computes on NVIDIA H200 (CUDA0, 161.1 GB) unless --gpu-layers 0",
    )


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "find_gpus", list)
    [finding] = checks.gpu(CheckContext(Settings()))
    assert finding.verdict == "ok" and not finding.advice
