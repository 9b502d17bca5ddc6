import httpx
import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ByteTokenizer, ScriptedEngine, say
from dragoman.errors import SettingsError
from dragoman.prompt.find import check_names, choose_dialect
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import HELLO, post, stream

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
    dialect = choose_dialect(named, CARD, ByteTokenizer()).dialect
    own = choose_dialect(Settings(dialect="hermes"), CARD, ByteTokenizer()).dialect
    other = choose_dialect(Settings(dialect="mistral_v13"), CARD, ByteTokenizer()).dialect
    assert (dialect.calls, dialect.reasoning) == (own.calls, other.reasoning)


@pytest.mark.parametrize("setting", ["dialect", "tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_fails_with_the_names_there_are(setting: str) -> None:
    with pytest.raises(SettingsError, match="hermes"):
        check_names(Settings(**{setting: "nobody"}))  # type: ignore[arg-type]


def test_a_template_that_is_given_counts_more_than_the_models() -> None:
    dialect = choose_dialect(Settings(), CARD, ByteTokenizer(), HERMES)
    assert (dialect.dialect.name, bool(dialect.how)) == ("hermes", True)


def test_models_tell_the_dialect(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("x")), dialect="qwen25")
    assert httpx.get(url + "/v1/models").json()["data"][0]["dialect"] == "hermes"


def test_reasoning_between_tags_that_are_given(serve: Serve) -> None:
    tags = {"reasoning_open": "<musing>", "reasoning_close": "</musing>"}
    url = serve(ScriptedEngine(say("<musing>Hm.</musing>\n\nYes.")), **tags)
    message = post(url, "/v1/chat/completions", HELLO).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(url, "/v1/chat/completions", HELLO)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    assert httpx.get(url + "/v1/models").json()["data"][0]["dialect"] == "plain+<musing>"


def test_reasoning_that_a_prompt_has_opened_by_such_a_tag(serve: Serve) -> None:
    opens = CHATML + "<musing>\n"
    card = ModelCard(name="m", max_model_len=4096, templates={"default": opens})
    url = serve(
        ScriptedEngine(say("Hm.</musing>Yes."), card=card),
        reasoning_open="<musing>",
        reasoning_close="</musing>",
        dialect="hermes",
    )
    message = post(url, "/v1/chat/completions", HELLO).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    "wrong",
    [
        {"reasoning_open": "<a>"},
        {"reasoning_close": "</a>"},
        {"reasoning_open": "<a>", "reasoning_close": "<a>"},
        {"reasoning_open": " ", "reasoning_close": "</a>"},
        {"reasoning_open": "<a>", "reasoning_close": "</a>", "reasoning_parser": "qwen3"},
        {"reasoning_open": "<a>", "reasoning_close": "</a>", "dialect": "harmony"},
    ],
)
def test_tags_that_cannot_be_used_end_the_start(wrong: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="reasoning_open"):
        chosen(**wrong)
