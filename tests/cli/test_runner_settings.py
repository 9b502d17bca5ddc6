"""Which runner is chosen by settings, and what people are told about it."""

import io

import msgspec
import pytest

from dragoman.cli.banner import banner
from dragoman.cli.checks import Patient, runner
from dragoman.cli.engine import engine_of
from dragoman.engines.local import opening
from dragoman.engines.protocol import ModelCard
from dragoman.errors import SettingsError
from dragoman.logs import Paint
from dragoman.settings import Settings

CARD = ModelCard(name="tiny", max_model_len=64, details={"runner": "llama.cpp"})


@pytest.mark.parametrize("engine", ["transformers", "vllm", "remote"])
@pytest.mark.parametrize("setting", [{"runner": "openvino"}, {"kv_cache": "int8"}, {"guesses": 0}])
def test_other_engines_have_no_runners(engine: str, setting: dict[str, object]) -> None:
    settings = msgspec.convert({"engine": engine, **setting}, Settings)
    with pytest.raises(SettingsError, match="for the engine `local`"):
        engine_of(settings)


def test_the_banner_says_why() -> None:
    why = "llama.cpp; not OpenVINO, because it is not installed"
    card = msgspec.structs.replace(CARD, details={**CARD.details, "why": why})
    assert why in banner(card, Settings(), "http://x", Paint(io.StringIO()))
    assert "OpenVINO" not in banner(CARD, Settings(), "http://x", Paint(io.StringIO()))


@pytest.mark.parametrize(("chosen", "verdict"), [("auto", "ok"), ("openvino", "failed")])
def test_doctor_says_why_not(chosen: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    (finding,) = runner(Patient(msgspec.convert({"runner": chosen}, Settings)))
    assert finding.verdict == verdict
    assert "dragoman[openvino]" in finding.text


def test_doctor_has_nothing_to_say_where_it_was_not_asked_for() -> None:
    assert not list(runner(Patient(Settings(runner="llamacpp"))))
