"""Which models there are: named ones, those of a folder, those of the cache. Nothing is loaded for it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli.engine import make_served_engine
from dragoman.engines.protocol import Engine
from dragoman.errors import ModelFileError, SettingsError
from dragoman.http.server import background
from dragoman.models.catalog import build_pool, own_settings
from dragoman.settings import Settings, options
from tests.support.http import HELLO, get, post
from tests.support.hub import SmallHub, running
from tests.support.tiny_gguf import write_split, write_tiny


def refuse(settings: Settings) -> Engine:
    raise AssertionError(f"{settings.model} was opened")


def test_models_of_the_settings_have_their_own() -> None:
    tables: dict[str, dict[str, Any]] = {
        "a": {"model": "a.gguf", "context": 512, "sampling": {"temperature": 0.1}},
        "b": {"model": "b.gguf", "dialect": "hermes"},
    }
    pool = build_pool(Settings(models=tables, context=1024, dialect="mistral"), refuse)
    a, b = pool.get("a").settings, pool.get("b").settings
    assert (a.model, a.context, a.dialect, a.model_name) == ("a.gguf", 512, "auto", "a")
    assert (b.context, b.dialect, b.sampling) == (1024, "hermes", {})
    assert pool.startup_model is pool.get("a")


def test_the_model_that_is_named_beside_them_comes_first() -> None:
    pool = build_pool(Settings(model="c.gguf", models={"a": {"model": "a.gguf"}}), refuse)
    assert list(pool.models) == ["c", "a"] and pool.startup_model is pool.default


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"model": "a.gguf", "port": 1}, "`models.a` cannot have `port`"),
        ({"context": 512}, "`models.a` needs `model`"),
        ({"model": "a.gguf", "context": 2}, "context"),
    ],
)
def test_a_wrong_table_is_told(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        own_settings(Settings(), "a", table)


def test_what_a_model_may_have_is_a_setting() -> None:
    from dragoman.models.catalog import INHERITED, OWN

    assert {option.name for option in options()} >= OWN | INHERITED
    assert not OWN & INHERITED


@pytest.mark.parametrize("as_model", [True, False])
def test_a_folder_of_models(tmp_path: Path, as_model: bool) -> None:
    write_tiny(tmp_path / "one.gguf")
    parts = write_split(tmp_path / "two.gguf")
    settings = Settings(model=str(tmp_path)) if as_model else Settings(models_dir=str(tmp_path))
    pool = build_pool(settings, refuse)
    assert len(parts) > 1 and list(pool.models) == ["one", "two"] and pool.startup_model is None
    assert pool.get("two").size() == sum(part.stat().st_size for part in parts)


def test_an_empty_folder_and_none() -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        build_pool(Settings(models_dir="/nowhere"), refuse)


def test_nothing_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model"):
        build_pool(Settings(models_dir=str(tmp_path)), refuse)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a model into a cache of the test's own."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))

    def put(repo: str) -> Path:
        folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / "c0"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("c0")
        return write_tiny(snapshot / "tiny-Q4_0.gguf")

    return put


def test_models_of_the_cache_only_where_that_is_allowed(cached: Callable[[str], Path]) -> None:
    cached("org/first")
    pool = build_pool(Settings(models_from_cache=True), refuse)
    assert [name.partition("/")[2][:5] for name in pool.models] == ["first"]
    cached("org/later")
    model = asyncio.run(pool.find_or_discover("org/later"))
    assert model.settings.model is not None and model.settings.model.endswith("tiny-Q4_0.gguf")
    assert build_pool(Settings(model="x.gguf"), refuse).find_more is None


def test_real_models_of_a_folder_take_turns(tmp_path: Path) -> None:
    """A small one of what `make torture` does a thousand times."""
    for name in ("a", "b", "c"):
        write_tiny(tmp_path / f"{name}.gguf")
    settings = Settings(
        port=0, store="none", models_dir=str(tmp_path), models_max=1, runner="llamacpp", kv_memory=8
    )
    pool = build_pool(settings, make_served_engine)
    with background(pool, settings) as url:
        for name in "abcabc":
            body = {**HELLO, "model": name, "max_tokens": 2}
            assert post(url, "/v1/chat/completions", body).json()["model"] == name
            states = {each["id"]: each["status"]["value"] for each in get(url, "/v1/models").json()["data"]}
            assert states == {other: "loaded" if other == name else "unloaded" for other in "abc"}


def test_a_model_is_pulled_and_served(
    cached: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = write_tiny(tmp_path / "first.gguf")
    settings = Settings(port=0, store="none", model=str(first), runner="llamacpp", kv_memory=8)
    hub = SmallHub({"Tiny-Q4_0.gguf": first.read_bytes()}, repo="org/tiny")
    pool = build_pool(settings, make_served_engine)
    with running(hub) as hub, background(pool, settings) as url:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        lines = post(url, "/api/pull", {"model": "hf.co/org/tiny:Q4_0"}).text.splitlines()
        assert lines[-1] == '{"status":"success"}'
        names = [each["id"] for each in get(url, "/v1/models").json()["data"]]
        assert names == ["first", "hf:org/tiny:Q4_0"]
        body = {**HELLO, "model": names[1], "max_tokens": 2}
        assert post(url, "/v1/chat/completions", body).status_code == 200
        gone = post(url, "/api/pull", {"model": "hf.co/org/nothing"})
        assert "error" in gone.text
