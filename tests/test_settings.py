from pathlib import Path

import pytest

from dragoman.errors import SettingsError
from dragoman.limits import Limits
from dragoman.settings import Settings, load, options


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file of the person who runs the tests."""
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "dragoman.toml") -> str:
    Path(name).write_text(text)
    return name


def test_defaults() -> None:
    assert load(environ={}) == Settings()


def test_flags_beat_the_environment_which_beats_the_file() -> None:
    write('host = "file"\nport = 1\nslots = 1\n')
    settings = load({"slots": "3"}, environ={"DRAGOMAN_PORT": "2", "DRAGOMAN_SLOTS": "2"})
    assert (settings.host, settings.port, settings.slots) == ("file", 2, 3)


def test_a_chosen_file_replaces_the_usual_one() -> None:
    write("port = 1\n")
    other = write("port = 2\n", "other.toml")
    assert load(environ={}, file=other).port == 2
    assert load(environ={"DRAGOMAN_CONFIG": other}).port == 2


def test_lists_come_from_commas_flags_and_files() -> None:
    write('model_alias = ["a", "b"]\n')
    settings = load({"lora": ["x=x.gguf", "y=y.gguf"]}, environ={"DRAGOMAN_API_KEY": "one, two,"})
    assert settings.model_alias == ["a", "b"]
    assert settings.api_key == ["one", "two"]
    assert settings.lora == ["x=x.gguf", "y=y.gguf"]


@pytest.mark.parametrize("value", ["", "  ", ","])
@pytest.mark.parametrize("name", ["DRAGOMAN_API_KEY", "DRAGOMAN_API_KEY_FILE", "DRAGOMAN_UPSTREAM_KEY"])
def test_an_empty_variable_of_a_key_is_not_no_key(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is empty: give it a value, or unset it"):
        load(environ={name: value})


def test_limits_merge_over_all_layers() -> None:
    write("[limits]\nmessages = 1\ntools = 1\n")
    settings = load({"limit_stops": "3"}, environ={"DRAGOMAN_LIMIT_TOOLS": "2"})
    assert settings.limits == Limits(messages=1, tools=2, stops=3)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert load(environ={"DRAGOMAN_LOG_JSON": text}).log_json is value


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        ({"port": "99999"}, {}, "port"),
        ({"port": "many"}, {}, "port"),
        ({"log_level": "loud"}, {}, "log_level"),
        ({"context": "1"}, {}, "context"),
        ({"limit_messages": "0"}, {}, "messages"),
        ({}, {"DRAGOMAN_KEEP_ALIVE": "0"}, "keep_alive"),
        ({}, {"DRAGOMAN_SLOTS": "300"}, "slots"),
    ],
)
def test_an_error_names_the_setting_and_its_place(
    flags: dict[str, str], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags, environ=environ)
    assert named in caught.value.message
    assert ("the command line" if flags else "the environment") in caught.value.message


def test_an_error_in_the_file_names_the_file_and_the_setting() -> None:
    write("prot = 1\n")
    with pytest.raises(SettingsError, match=r"dragoman\.toml.*prot"):
        load(environ={})


def test_a_chosen_file_must_be_there() -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml cannot be read: No such file"):
        load(environ={}, file="nowhere.toml")


def test_a_file_must_be_toml() -> None:
    write("port: 1\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load(environ={})


def test_an_empty_variable_is_not_an_empty_list() -> None:
    assert load(environ={"DRAGOMAN_CORS_ORIGIN": ""}).cors_origin == []


def test_every_setting_is_an_option_with_help_and_a_variable() -> None:
    fields = {option.name: option for option in options()}
    assert set(Settings.__struct_fields__) - {"limits"} <= set(fields)
    assert {f"limit_{name}" for name in Limits.__struct_fields__} <= set(fields)
    assert all(option.help for option in fields.values())
    assert (fields["api_key"].flag, fields["api_key"].env) == ("--api-key", "DRAGOMAN_API_KEY")
    assert fields["api_key"].is_list
    assert fields["log_json"].is_bool
    assert fields["log_level"].choices == ("debug", "info", "warning", "error")


def test_an_object_comes_from_json_and_from_a_table() -> None:
    write("[engine_args]\nseed = 1\n")
    settings = load({"engine_args": '{"enforce_eager": true}'}, environ={})
    assert settings.engine_args == {"seed": 1, "enforce_eager": True}


def test_an_object_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="engine_args"):
        load({"engine_args": "[1]"}, environ={})
