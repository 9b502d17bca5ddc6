import httpx
import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ByteTokenizer, ScriptedEngine, say
from dragoman.errors import SettingsError
from dragoman.settings import Settings
from dragoman.turns.reading import check_names, choose_dialect
from tests.http.conftest import Serve

CARD = ModelCard(name="m", max_model_len=1, templates={"default": CHATML})
SHOWN = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
HERMES = f"{CHATML}{{# {SHOWN} #}}"


def chosen(**named: str) -> str:
    return choose_dialect(Settings(**named), CARD, ByteTokenizer()).dialect.name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({"dialect": "hermes"}, "hermes"),
        ({"tool_call_parser": "qwen25"}, "hermes"),
        ({"tool_call_parser": "hermes", "dialect": "glm45"}, "hermes"),
        ({"tool_call_parser": "hermes", "reasoning_parser": "hermes"}, "hermes"),
        ({"tool_call_parser": "hermes", "reasoning_parser": "mistral_v13"}, "hermes+mistral_v13"),
    ],
)
def test_settings_name_the_dialect(named: dict[str, str], name: str) -> None:
    assert chosen(**named) == name


def test_calls_of_the_one_and_reasoning_of_the_other() -> None:
    named = Settings(tool_call_parser="hermes", reasoning_parser="mistral_v13")
    made = choose_dialect(named, CARD, ByteTokenizer()).dialect
    own = choose_dialect(Settings(dialect="hermes"), CARD, ByteTokenizer()).dialect
    other = choose_dialect(Settings(dialect="mistral_v13"), CARD, ByteTokenizer()).dialect
    assert (made.calls, made.reasoning) == (own.calls, other.reasoning)


@pytest.mark.parametrize("setting", ["dialect", "tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_fails_with_the_names_there_are(setting: str) -> None:
    with pytest.raises(SettingsError, match="hermes"):
        check_names(Settings(**{setting: "nobody"}))  # type: ignore[arg-type]


def test_a_template_that_is_given_counts_more_than_the_models() -> None:
    found = choose_dialect(Settings(), CARD, ByteTokenizer(), HERMES)
    assert (found.dialect.name, bool(found.how)) == ("hermes", True)


def test_models_tell_the_dialect(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("x")), dialect="qwen25")
    assert httpx.get(url + "/v1/models").json()["data"][0]["dialect"] == "hermes"
