"""Which runner is chosen by settings, and what people are told about it."""

import io
from pathlib import Path

import msgspec
import pytest

from dragoman.cli import builtin_engines
from dragoman.cli.checks import CheckContext, runner
from dragoman.cli.engine import engine_of
from dragoman.cli.model_info import banner
from dragoman.cli.parser import SETTING, CommandParser, add_settings
from dragoman.engines.local import LocalEngine, opening
from dragoman.engines.local.binding import GpuDevice
from dragoman.engines.local.gguf_model import LlamaModel
from dragoman.engines.local.hardware import check_context, pages_for
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.protocol import ModelCard
from dragoman.errors import SettingsError
from dragoman.logs import Colorizer
from dragoman.settings import Settings
from tests.support.tiny_projectors import write_pair

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
    assert why in banner(card, Settings(), "http://x", Colorizer(io.StringIO()))
    assert "OpenVINO" not in banner(CARD, Settings(), "http://x", Colorizer(io.StringIO()))


@pytest.mark.parametrize(("chosen", "verdict"), [("auto", "ok"), ("openvino", "failed")])
def test_doctor_says_why_not(chosen: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    (finding,) = runner(CheckContext(msgspec.convert({"runner": chosen}, Settings)))
    assert finding.verdict == verdict
    assert "dragoman[openvino]" in finding.text


def test_doctor_has_nothing_to_say_where_it_was_not_asked_for() -> None:
    assert not list(runner(CheckContext(Settings(runner="llamacpp"))))


def test_bfloat16_that_the_cpu_has_not_is_an_error_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr("dragoman.engines.local.openvino.compiled_graph.has_bfloat16", lambda: False)
    options = LocalOptions(runner="openvino", kv_cache="bf16")
    with pytest.raises(SettingsError, match="set int8 or auto"):
        opening.open_model(tmp_path / "nowhere.gguf", options)
    (finding,) = runner(CheckContext(Settings(runner="openvino", kv_cache="bf16")))
    assert (finding.verdict, "bf16" in finding.text) == ("failed", True)


def test_a_context_longer_than_the_models_is_an_error() -> None:
    check_context(8192, 8192)
    check_context(10**6, 0)  # a file that does not say
    with pytest.raises(SettingsError, match="trained for 8192 tokens; set 8192 or less"):
        check_context(8193, 8192)


def test_more_keys_and_values_than_there_is_memory_is_an_error() -> None:
    options = LocalOptions(slots=256, context=100_000)
    with pytest.raises(SettingsError, match=r"A context of 100000 tokens would take .* GiB"):
        pages_for(32, 1 << 30, 8192, options)


def test_upstreams_alone_know_whether_they_are_deterministic() -> None:
    settings = Settings(engine="remote", upstream=["http://x"], tokenizer="x", deterministic=True)
    with pytest.raises(SettingsError, match="settings of the upstreams"):
        engine_of(settings)


def test_transformers_is_deterministic_with_one_answer_at_a_time() -> None:
    with pytest.raises(SettingsError, match="needs `slots` to be 1"):
        engine_of(Settings(engine="transformers", model="x", slots=2, deterministic=True))


def test_llamacpp_is_not_deterministic_without_fused_attention(weights: Path) -> None:
    options = LocalOptions(runner="llamacpp", deterministic=True, flash_attention=False)
    with pytest.raises(SettingsError, match="leave `flash_attention` on"):
        opening.open_model(weights, options)


def test_nor_with_f16_where_layers_cannot_be_set_back(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaModel, "rewinds", property(lambda model: False))
    options = LocalOptions(runner="llamacpp", deterministic=True, kv_cache="f16")
    with pytest.raises(SettingsError, match="set `kv_cache` to int8"):
        opening.open_model(weights, options)


def test_nor_is_it_on_a_gpu(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_gpus_for", lambda options: [GpuDevice("CUDA0", "a GPU", 0)])
    with pytest.raises(SettingsError, match="set `gpu_layers` to 0"):
        opening.open_model(weights, LocalOptions(runner="llamacpp", deterministic=True))


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ([], "mmproj-plain.gguf"),
        (["--no-mmproj"], None),
        (["--no-mmproj-auto"], None),
        (["--runner", "openvino"], None),
        (["-mm", "elsewhere.gguf"], "elsewhere.gguf"),
        (["--no-mmproj", "--mmproj", "elsewhere.gguf"], "elsewhere.gguf"),
    ],
)
def test_a_projector_is_found_beside_the_model(flags: list[str], found: str | None, tmp_path: Path) -> None:
    model, _ = write_pair(tmp_path, "plain")
    parser = CommandParser()
    add_settings(parser)
    fields = vars(parser.parse_args(flags))
    mapping = {
        name.removeprefix(SETTING): value for name, value in fields.items() if name.startswith(SETTING)
    }
    chosen = builtin_engines._find_mmproj(msgspec.convert(mapping, Settings), model)
    assert (chosen and Path(chosen).name) == found


def test_the_banner_has_the_projector(tmp_path: Path) -> None:
    model, _ = write_pair(tmp_path, "plain")
    engine = builtin_engines.local(Settings(model=str(model), context=64, slots=1))
    assert isinstance(engine, LocalEngine)
    engine.close()
    text = banner(engine.card, Settings(), "http://x", Colorizer(io.StringIO()))
    assert "projector mmproj-plain.gguf" in text
    assert "required by the projector" in text
    assert engine.card.modalities == {"image"}
