import subprocess
import sys
from pathlib import Path

import pytest

from dragoman import __version__, cli, settings
from dragoman.cli import main
from dragoman.cli.parser import nearest, stray_variables
from dragoman.errors import BindingError, ModelFileError

Capture = pytest.CaptureFixture[str]


def test_no_command_shows_help(capsys: Capture) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name}" in text for name in cli.COMMANDS)


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dragoman {__version__}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"  dragoman {command}" in text


def test_every_setting_is_in_the_help_of_serve(capsys: Capture) -> None:
    main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in settings.options():
        assert option.flag in text
        assert f"env: {option.env}" in text
    assert "default: 8000" in text


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["srve"], "no command srve", "dragoman serve"),
        (["serve", "--prot", "9000"], "no flag --prot", "--port"),
        (["serve", "--prot=9000"], "no flag --prot", "--port"),
        (["bench", "--steams", "1"], "no flag --steams", "--streams"),
        (["serve", "a.gguf", "b.gguf"], "no argument b.gguf", "--help"),
        (["serve", "--log-level", "loud"], "invalid choice", "--help"),
        (["serve", "--port"], "expected one argument", "--help"),
        (["serve", "--port", "many"], "port", "--help"),
        (["serve", "a.gguf", "--model", "b.gguf"], "given twice", "Keep one"),
        (["bench", "--streams", "1,x"], "--streams takes numbers", ""),
        (["bench", "--tokens", "0"], "0 is not a whole number above 0", "--help"),
        (
            ["bench", "--url", "http://[", "--model", "m"],
            "http://[ is not a valid URL",
            "http://127.0.0.1:8000",
        ),
        (["chat", "hi", "--url", "ftp://x"], "ftp://x is not a valid URL", "http://127.0.0.1:8000"),
        (["models", "--url", "h:99999"], "h:99999 is not a valid URL", "http://127.0.0.1:8000"),
        (["models", "--url", "h:1", "--api-key", "a\nb"], "not allowed in an HTTP header", ""),
        (["bench", "--extra", "[]"], "--extra takes a JSON object", ""),
        (["serve", "--config", "nowhere.toml"], "nowhere.toml cannot be read", "--help"),
    ],
)
def test_wrong_usage_is_told_in_one_line_with_a_hint(
    arguments: list[str], message: str, hint: str, capsys: Capture
) -> None:
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert message in text
    assert hint in text
    assert "Traceback" not in text


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr("dragoman.cli.models.run", run)
    monkeypatch.setattr("dragoman.cli.serve.run", run)


def test_our_errors_are_one_line_and_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    broken(monkeypatch, ModelFileError("There is no file x."))
    assert main(["models"]) == 1
    assert capsys.readouterr().err.startswith("error: There is no file x.\nhint:")


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    broken(monkeypatch, BindingError("It does not fit."))
    assert main(["serve", "--log-level", "debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_leaves_quietly(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    broken(monkeypatch, KeyboardInterrupt())
    assert main(["models"]) == 130
    assert capsys.readouterr().err == ""


def test_help_needs_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("httpx", "uvicorn", "numpy", "starlette", "jinja2", "xllamacpp")
    code = (
        f"import sys; from dragoman.cli import main; main(['serve', '-h']); print({heavy!r}, file=sys.stderr)"
    )
    code += f"; sys.exit(any(name in sys.modules for name in {heavy!r}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True).returncode == 0


def test_the_package_can_be_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dragoman", "--version"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.startswith(
        "dragoman "
    )


def test_a_variable_that_is_no_setting_is_told() -> None:
    environ = {"DRAGOMAN_PROT": "1", "DRAGOMAN_PORT": "1", "DRAGOMAN_CACHE": "x", "HOME": "/"}
    assert list(stray_variables(environ)) == ["DRAGOMAN_PROT is not a setting; did you mean DRAGOMAN_PORT?"]


def test_nearest() -> None:
    assert nearest("--prot", ["--host", "--port"]) == "--port"
    assert nearest("--zzz", ["--host", "--port"]) is None
