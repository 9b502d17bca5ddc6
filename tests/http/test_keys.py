"""Which keys a server has, and when it does not start without."""

import logging
from pathlib import Path

import pytest

import dragoman
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import SettingsError
from dragoman.http.keys import ApiKeys, check_closed, is_loopback, keys_of
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.http import get


def keys_in(folder: Path, text: str) -> str:
    file = folder / "keys"
    file.write_text(text)
    return str(file)


def test_keys_come_from_the_settings_and_from_a_file(tmp_path: Path) -> None:
    file = keys_in(tmp_path, "# ours\nsk-1\n\n  sk-2  \n")
    assert keys_of(Settings(api_key=["sk-0"], api_key_file=file)) == ["sk-0", "sk-1", "sk-2"]


@pytest.mark.parametrize("text", ["", "\n\n", "# sk-1\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    """Who names one does not mean an open server."""
    with pytest.raises(SettingsError, match="no key"):
        ApiKeys(Settings(api_key_file=keys_in(tmp_path, text)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Cannot read"):
        keys_of(Settings(api_key_file=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "a\x00b", "\u00a0"])
def test_a_key_that_nobody_could_send_is_refused(key: str) -> None:
    """An empty one would let everybody in who sends an empty header."""
    with pytest.raises(SettingsError, match="key"):
        keys_of(Settings(api_key=["fine", key]))


def test_a_server_takes_the_keys_of_a_file(tmp_path: Path) -> None:
    settings = Settings(port=0, store="memory", api_key_file=keys_in(tmp_path, "sk-1\nsk-2\n"))
    with background(ScriptedEngine(say("hi")), settings) as url:
        statuses = [
            get(url, "/v1/models", **headers).status_code
            for headers in ({}, {"x-api-key": "sk-2"}, {"x-api-key": "# ours"}, {"x-api-key": ""})
        ]
    assert statuses == [401, 200, 401, 401]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.1", "::ffff:10.0.0.1", "a.example"])
def test_a_server_for_others_needs_a_key(host: str) -> None:
    with pytest.raises(SettingsError, match="DRAGOMAN_API_KEY"):
        check_closed(Settings(host=host))
    check_closed(Settings(host=host, api_key=["sk-1"]))
    check_closed(Settings(host=host, insecure=True))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_a_server_for_this_machine_does_not(host: str) -> None:
    assert is_loopback(host)
    check_closed(Settings(host=host))


def test_serve_refuses_before_it_listens() -> None:
    with pytest.raises(SettingsError, match="insecure"):
        dragoman.serve(ScriptedEngine(say("hi")), host="0.0.0.0", port=0)


def test_an_open_server_says_so(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(host="0.0.0.0", port=0, store="memory", insecure=True)
    with caplog.at_level(logging.WARNING, "dragoman"), background(ScriptedEngine(say("hi")), settings) as url:
        # It has no name of its own to insist on.
        assert get(url.replace("0.0.0.0", "127.0.0.1"), "/health", host="a.example").status_code == 200
    assert "No API key is set" in caplog.text
