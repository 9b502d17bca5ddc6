"""What each key may do: the file of keys, changes of it while a server runs, and the keys of admins."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import Forbidden, SettingsError, Unauthorized
from dragoman.http import keys as keys_module
from dragoman.http.key_file import add_key, describe_key, hash_key, new_key, read_key_file, revoke_key
from dragoman.http.keys import ApiKeys
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.http import get, post

ONE, TWO, ADMIN = "sk-one-0123456789-0123456789", "sk-two-0123456789-0123456789", "sk-admin-0123456789-01234"
PAUSE = "/v1/engine/pause"


def sent(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "POLL_INTERVAL_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> str:
    name = str(tmp_path / "keys")
    add_key(name, describe_key(ONE, name="one"))
    return name


# The file


def test_a_key_is_kept_as_a_hash_and_nobody_else_reads_it(file: str) -> None:
    add_key(file, describe_key(TWO, name="two", models=["qwen*"], tokens_per_day=10))
    text = Path(file).read_text()
    assert ONE not in text and TWO not in text
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert [key.name for key in read_key_file(file)] == ["one", "two"]
    assert read_key_file(file)[1].sha256 == hash_key(TWO)


def test_a_key_that_was_plain_is_the_same_as_its_hash(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text(f"# ours\n{ONE}\n")
    add_key(str(plain), describe_key(TWO, name="two"))
    assert plain.read_text().startswith(f"# ours\n{ONE}\n")
    keys = ApiKeys(Settings(api_key_file=str(plain)))
    assert keys.authenticate(sent(ONE)).sha256 == hash_key(ONE)
    assert keys.authenticate(sent(TWO)).name == "two"


@pytest.mark.parametrize(
    "line",
    ["{", '{"name": "x"}', '{"sha256": "ab"}', '{"name": "x", "sha256": "' + hash_key("") + '"}',
     '{"name": "x", "sha256": "' + "0" * 64 + '", "admn": true}',
     '{"name": "x", "sha256": "' + "0" * 64 + '", "tokens_per_day": 0}'],
)  # fmt: skip
def test_a_line_that_is_wrong_is_refused_and_not_shown(tmp_path: Path, line: str) -> None:
    name = tmp_path / "keys"
    name.write_text(f"{line}\n")
    with pytest.raises(SettingsError) as refused:
        ApiKeys(Settings(api_key_file=str(name)))
    assert "0000" not in refused.value.message


def test_two_keys_of_one_name_are_refused(file: str) -> None:
    with pytest.raises(SettingsError, match="another name"):
        add_key(file, describe_key(TWO, name="one"))
    with pytest.raises(SettingsError, match="already"):
        add_key(file, describe_key(ONE, name="other"))
    with pytest.raises(SettingsError, match="no key named"):
        revoke_key(file, "two")


def test_new_keys_cannot_be_guessed() -> None:
    texts = {new_key() for _ in range(100)}
    assert len(texts) == 100
    assert all(len(key) >= 40 and key.startswith("sk-dgm-") for key in texts)


# Changes hold at once


def test_keys_come_and_go_without_a_restart(file: str) -> None:
    settings = Settings(port=0, store="memory", api_key_file=file)
    with background(ScriptedEngine(say("hi")), settings) as url:

        def asked(key: str) -> int:
            return get(url, "/v1/models", authorization=f"Bearer {key}").status_code

        assert [asked(ONE), asked(TWO)] == [200, 401]
        add_key(file, describe_key(TWO, name="two"))
        assert [asked(ONE), asked(TWO)] == [200, 200]
        revoke_key(file, "one")
        assert [asked(ONE), asked(TWO)] == [401, 200]
        revoke_key(file, "two")
        # There is no key any more, and it is still not open.
        assert [asked(ONE), asked(TWO), get(url, "/v1/models").status_code] == [401] * 3


@pytest.mark.parametrize("how", ["gone", "broken", "binary"])
def test_a_file_that_cannot_be_read_changes_nothing(
    file: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    keys = ApiKeys(Settings(api_key_file=file))
    if how == "gone":
        Path(file).unlink()
    else:
        Path(file).write_bytes(b"{" if how == "broken" else b"\xff\xfe")
    with caplog.at_level(logging.ERROR, "dragoman"):
        assert keys.authenticate(sent(ONE)).name == "one"
        assert keys.authenticate(sent(ONE)).name == "one"
    assert caplog.text.count("not reloaded") == 1


def test_what_is_shared_out_follows_the_number_of_keys(file: str) -> None:
    keys = ApiKeys(Settings(api_key_file=file))
    counts: list[int] = []
    keys.on_change = lambda: counts.append(len(keys))
    add_key(file, describe_key(TWO, name="two"))
    keys.authenticate(sent(ONE))
    revoke_key(file, "two")
    keys.authenticate(sent(ONE))
    assert counts == [2, 1]


# Admins


@pytest.fixture(scope="module")
def administered() -> Iterator[str]:
    settings = Settings(port=0, store="memory", api_key=[ONE], admin_key=[ADMIN])
    with background(ScriptedEngine(say("hi")), settings) as url:
        yield url


def test_an_admin_key_is_a_key_too(administered: str) -> None:
    assert get(administered, "/v1/models", **{"x-api-key": ADMIN}).status_code == 200


def test_what_operators_do_takes_the_admin_key_where_there_is_one(administered: str) -> None:
    refused = post(administered, PAUSE, {}, **{"x-api-key": ONE})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_required")
    assert post(administered, PAUSE, {}, **{"x-api-key": "wrong"}).status_code == 401
    assert post(administered, PAUSE, {}, **{"x-api-key": ADMIN}).status_code == 200
    assert post(administered, "/v1/engine/resume", {}, **{"x-api-key": ADMIN}).status_code == 200


def test_an_admin_key_alone_closes_nothing() -> None:
    settings = Settings(port=0, store="memory", admin_key=[ADMIN])
    with background(ScriptedEngine(say("hi")), settings) as url:
        assert get(url, "/v1/models").status_code == 200
        assert post(url, PAUSE, {}).status_code == 401
        assert post(url, PAUSE, {}, **{"x-api-key": ADMIN}).status_code == 200


def test_without_an_admin_key_nobody_is_one() -> None:
    with pytest.raises(Forbidden, match="DRAGOMAN_ADMIN_KEY") as refused:
        ApiKeys(Settings(api_key=[ONE])).require_admin(sent(ONE))
    assert refused.value.code == "no_admin_key"
    with pytest.raises(Forbidden, match="DRAGOMAN_ADMIN_KEY"):
        ApiKeys(Settings()).require_admin({})


def test_who_is_an_admin(tmp_path: Path) -> None:
    admins, clients = tmp_path / "admins", str(tmp_path / "clients")
    admins.write_text(f"{ADMIN}\n")
    add_key(clients, describe_key(ONE, name="one", admin=True))
    add_key(clients, describe_key(TWO, name="two"))
    keys = ApiKeys(Settings(api_key_file=clients, admin_key_file=str(admins)))
    keys.require_admin(sent(ONE))
    keys.require_admin(sent(ADMIN))
    with pytest.raises(Forbidden, match="is not one"):
        keys.require_admin(sent(TWO))
    with pytest.raises(Unauthorized, match="admin key"):
        keys.require_admin({})


@pytest.mark.parametrize(
    ("name", "value"), [("admin_key", [""]), ("admin_key", ["a b"]), ("admin_key_file", "/nowhere")]
)
def test_an_admin_key_that_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError):
        ApiKeys(Settings(**{name: value}))


# Models


@pytest.mark.parametrize(
    ("models", "name", "may"),
    [([], "any", True), (["a"], "a", True), (["a"], "ab", False), (["a*"], "ab", True), (["a"], "A", False)],
)
def test_which_models_a_key_may_use(models: list[str], name: str, may: bool) -> None:
    assert describe_key(ONE, name="one", models=models).may_use(name) is may
    assert describe_key(ONE, name="one", models=models, admin=True).may_use(name)


def test_a_key_for_some_models_is_no_operators(tmp_path: Path) -> None:
    file = str(tmp_path / "keys")
    add_key(file, describe_key(ONE, name="one", models=["a"]))
    with pytest.raises(Forbidden):
        ApiKeys(Settings(api_key_file=file)).check_operator(sent(ONE))


def test_the_file_is_lines_of_json(file: str) -> None:
    [line] = Path(file).read_text().splitlines()
    assert json.loads(line) == {"name": "one", "sha256": hash_key(ONE), "begins": ONE[:4]}
