"""Adapters that come and go while a server runs: who may change them, what may be loaded, who uses one."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.engines.protocol import AdapterEngine, ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.engines.supervisor import SupervisedEngine
from dragoman.errors import ModelFileError
from dragoman.http.server import background
from dragoman.limits import Limits
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import HELLO, get, get_json, post, refusal, send
from tests.support.wait import becomes

LOAD, UNLOAD, SCALES = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"
CHAT = "/v1/chat/completions"


class Adaptable(ScriptedEngine):
    """`loaded` has what a real engine would hold in memory."""

    def __init__(self, text: str = "hi", interval: float = 0.0, *, mixes: bool = True) -> None:
        card = ModelCard(
            name="scripted",
            max_model_len=4096,
            templates={"default": CHATML},
            adapters=("clerk",),
            combines_adapters=mixes,
        )
        super().__init__(say(text), card=card, interval=interval)
        self.loaded = {"clerk": "clerk.gguf"}

    async def load_adapter(self, name: str, path: str) -> None:
        assert name not in self.loaded
        if Path(path).read_bytes() != b"lora":
            raise ModelFileError(f"{path} is no adapter.")
        self.loaded[name] = path

    async def unload_adapter(self, name: str) -> None:
        del self.loaded[name]

    @property
    def latest(self) -> Any:
        return self.jobs[-1].adapters


def fill(path: Path) -> Path:
    inside = path / "adapters"
    (inside / "deep").mkdir(parents=True)
    for name in ("poet.gguf", "monk.gguf", "deep/poet.gguf"):
        (inside / name).write_bytes(b"lora")
    (inside / "broken.gguf").write_bytes(b"else")
    (path / "secret.gguf").write_bytes(b"lora")
    (inside / "way_out.gguf").symlink_to(path / "secret.gguf")
    return inside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server at which nothing that is tried succeeds."""
    engine = Adaptable()
    folder = fill(tmp_path_factory.mktemp("strict"))
    settings = Settings(port=0, lora_dir=str(folder), model_alias=["other"])
    with background(engine, settings) as url:
        yield url
        assert list(engine.loaded) == ["clerk"]
        assert get(url, SCALES).json()[0]["scale"] == 0


def load(url: str, name: str = "poet", path: str = "poet.gguf", **more: object) -> httpx.Response:
    return post(url, LOAD, {"lora_name": name, "lora_path": path, **more})


def unload(url: str, name: str = "poet") -> httpx.Response:
    return post(url, UNLOAD, {"lora_name": name})


def ask(url: str, **fields: object) -> httpx.Response:
    return post(url, CHAT, {**HELLO, **fields})


def names(url: str) -> list[str]:
    return [model["id"] for model in get_json(url, "/v1/models")["data"]]


def test_an_adapter_comes_and_goes_in_the_words_of_vllm(serve: Serve, folder: Path) -> None:
    engine = Adaptable()
    url = serve(engine, lora_dir=str(folder))
    assert ask(url, model="poet").status_code == 404
    assert load(url).text == "Success: LoRA adapter 'poet' added successfully."
    assert names(url) == ["scripted", "clerk", "poet"]
    assert ask(url, model="poet").status_code == 200
    assert engine.latest == (("poet", 1.0),)
    assert unload(url).text == "Success: LoRA adapter 'poet' removed successfully."
    assert names(url) == ["scripted", "clerk"]
    assert ask(url, model="poet").status_code == 404
    assert becomes(lambda: list(engine.loaded) == ["clerk"])


def test_the_fingerprint_changes_when_answers_may(serve: Serve, folder: Path) -> None:
    url = serve(Adaptable(), lora_dir=str(folder))

    def seen() -> str:
        fingerprint: str = ask(url).json()["system_fingerprint"]
        return fingerprint

    first = seen()
    load(url)
    loaded = seen()
    send("POST", url, SCALES, json=[{"id": 1, "scale": 0.5}])
    scaled = seen()
    assert len({first, loaded, scaled}) == 3
    send("POST", url, SCALES, json=[])
    assert seen() == loaded
    load(url, path="monk.gguf", load_inplace=True)
    assert seen() == loaded
    unload(url)
    assert seen() == first


def test_without_a_folder_nothing_is_changed(serve: Serve, folder: Path) -> None:
    engine = Adaptable()
    url = serve(engine)
    replies = [
        load(url, path=str(folder / "poet.gguf")),
        unload(url, "clerk"),
        post(url, SCALES, {"adapters": []}),
    ]
    assert [reply.status_code for reply in replies] == [403] * 3
    assert all("--lora-dir" in reply.json()["error"]["message"] for reply in replies)
    assert list(engine.loaded) == ["clerk"]


def test_a_key_is_wanted(serve: Serve, folder: Path) -> None:
    url = serve(Adaptable(), lora_dir=str(folder), api_key=["secret"])
    assert [post(url, path, {}).status_code for path in (LOAD, UNLOAD, SCALES)] == [401] * 3
    assert get(url, SCALES).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "../secret.gguf",
        "deep/../../secret.gguf",
        "way_out.gguf",
        "/etc/passwd",
        "no.gguf",
        ".",
        "",
        "a\0b",
        "x" * 4000,
    ],
)
def test_only_what_is_in_the_folder_can_be_loaded(strict: str, path: str) -> None:
    assert refusal(load(strict, path=path)) == (400, "lora_path")


def test_a_path_may_be_deep_or_absolute(serve: Serve, folder: Path) -> None:
    url = serve(Adaptable(), lora_dir=str(folder))
    assert (
        load(url, "a", "deep/poet.gguf").status_code == load(url, "b", str(folder / "poet.gguf")).status_code
    )
    assert [each["path"] for each in get_json(url, SCALES)][1:] == ["deep/poet.gguf", "poet.gguf"]  # type: ignore[index]


def test_what_the_engine_cannot_load_is_told(strict: str) -> None:
    reply = load(strict, path="broken.gguf")
    assert refusal(reply) == (400, "lora_path")
    assert reply.json()["error"]["message"] == "broken.gguf is no adapter."
    assert names(strict) == ["scripted", "other", "clerk"]


def test_an_engine_without_such_methods_says_so(serve: Serve, folder: Path) -> None:
    engine = ScriptedEngine(say("hi"))
    assert not isinstance(engine, AdapterEngine)
    reply = load(serve(engine, lora_dir=str(folder)))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_model")
    assert "--lora NAME=FILE" in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["clerk", "scripted", "other", " ", "a\nb", "poet#2", "", "x" * 600])
def test_a_name_that_cannot_be(strict: str, name: str) -> None:
    assert refusal(load(strict, name)) == (400, "lora_name")


def test_there_are_only_so_many(serve: Serve, folder: Path) -> None:
    url = serve(Adaptable(), lora_dir=str(folder), limits=Limits(adapters=2))
    assert [load(url, name).status_code for name in "ab"] == [200, 400]


def test_what_is_not_there_cannot_be_unloaded(strict: str) -> None:
    assert refusal(unload(strict)) == (404, "lora_name")


def test_the_second_of_a_name_is_another_for_the_engine(serve: Serve, folder: Path) -> None:
    """So nothing that it keeps of the first, such as prefixes, is taken for the second's."""
    engine = Adaptable()
    url = serve(engine, lora_dir=str(folder))
    load(url)
    assert refusal(load(url, path="monk.gguf")) == (400, "lora_name")
    assert load(url, path="monk.gguf", load_inplace=True).status_code == 200
    ask(url, model="poet")
    assert engine.latest == (("poet#2", 1.0),)
    assert names(url) == ["scripted", "clerk", "poet"]
    assert becomes(lambda: list(engine.loaded) == ["clerk", "poet#2"])


def test_numbers_stay_when_others_go(serve: Serve, folder: Path) -> None:
    engine = Adaptable()
    url = serve(engine, lora_dir=str(folder))
    load(url)
    unload(url, "clerk")
    load(url, "monk")
    assert {model["id"]: model.get("lora_id") for model in get_json(url, "/v1/models")["data"]} == {
        "scripted": None,
        "poet": 1,
        "monk": 2,
    }
    ask(url, lora=[{"id": 1}])
    assert engine.latest == (("poet", 1.0),)
    assert refusal(ask(url, lora=[{"id": 0}])) == (400, "lora[0]")


def test_one_in_use_stays_until_its_last_answer_is_over(serve: Serve, folder: Path) -> None:
    engine = Adaptable("x" * 100, interval=0.005)
    url = serve(engine, lora_dir=str(folder))
    load(url)
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(url, model="poet"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert becomes(lambda: engine.live == 4)
    assert unload(url).status_code == 200
    assert ask(url, model="poet").status_code == 404
    assert "poet" in engine.loaded
    # The next of that name comes at once, beside it.
    assert load(url, path="monk.gguf").status_code == 200
    assert list(engine.loaded) == ["clerk", "poet", "poet#2"]
    for thread in threads:
        thread.join()
    assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == ["x" * 100] * 4
    assert becomes(lambda: list(engine.loaded) == ["clerk", "poet#2"])


def test_a_client_that_leaves_gives_its_adapter_back(serve: Serve, folder: Path) -> None:
    engine = Adaptable("x" * 5000, interval=0.005)
    url = serve(engine, lora_dir=str(folder))
    load(url)
    with httpx.stream("POST", url + CHAT, json={**HELLO, "model": "poet", "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        unload(url)
        assert "poet" in engine.loaded
    assert becomes(lambda: list(engine.loaded) == ["clerk"])


def test_scales_are_for_those_who_name_no_adapter(serve: Serve, folder: Path) -> None:
    engine = Adaptable()
    url = serve(engine, lora_dir=str(folder))
    load(url)
    assert send("POST", url, SCALES, json=[{"id": 1, "scale": 0.5}, {"id": 0, "scale": 2}]).json() == {
        "success": True
    }
    assert get(url, SCALES).json() == [
        {"id": 0, "path": "", "scale": 2.0, "name": "clerk"},
        {"id": 1, "path": "poet.gguf", "scale": 0.5, "name": "poet"},
    ]
    for fields, used in (
        ({}, (("clerk", 2.0), ("poet", 0.5))),
        ({"model": "poet"}, (("poet", 1.0),)),
        ({"lora": []}, ()),
        ({"lora": "clerk"}, (("clerk", 1.0),)),
    ):
        assert ask(url, **fields).status_code == 200
        assert engine.latest == used
    # What is not in the list is off.
    post(url, SCALES, {"adapters": [{"id": 1, "scale": 1}]})
    ask(url)
    assert engine.latest == (("poet", 1.0),)


@pytest.mark.parametrize(
    ("scales", "place"),
    [
        ([{"id": 7, "scale": 1}], "adapters[0].id"),
        ([{"id": 0}], "adapters[0].scale"),
        ([{"id": 0, "scale": 1e9}], "adapters[0].scale"),
        ([{"id": 0, "scale": "much"}], "adapters[0].scale"),
        ({"loras": []}, "loras"),
    ],
)
def test_wrong_scales_change_nothing(strict: str, scales: Any, place: str) -> None:
    assert refusal(send("POST", strict, SCALES, json=scales)) == (400, place)


def test_an_engine_that_does_not_mix_has_one_at_its_full_strength(serve: Serve, folder: Path) -> None:
    url = serve(Adaptable(mixes=False), lora_dir=str(folder))
    load(url)
    assert send("POST", url, SCALES, json=[{"id": 0, "scale": 0.5}]).status_code == 400
    assert send("POST", url, SCALES, json=[{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]).status_code == 400
    assert send("POST", url, SCALES, json=[{"id": 0, "scale": 1}]).status_code == 200


def test_an_engine_that_comes_back_has_them_again(serve: Serve, folder: Path) -> None:
    adaptables: list[Adaptable] = []

    def open_engine() -> Adaptable:
        adaptables.append(Adaptable())
        return adaptables[-1]

    url = serve(SupervisedEngine(open_engine), lora_dir=str(folder))
    load(url)
    load(url, "monk")
    unload(url, "monk")
    adaptables[0]._dead = True
    assert becomes(lambda: len(adaptables) == 2 and ask(url, model="poet").status_code == 200)
    assert list(adaptables[1].loaded) == ["clerk", "poet"]
