"""Models are fetched from a hub that cuts, lies, redirects and refuses, into the cache that all share."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dragoman.errors import ModelFileError
from dragoman.hub import find_projector, locate, parse_name, pull, resolve_name
from dragoman.hub.cache import cache_root, find_cached, list_cached, list_folder, remove
from dragoman.hub.names import ModelName
from tests.support.hub import COMMIT, SmallHub, git_id, running

NAME = ModelName("org/repo", "Q4_0")
WEIGHTS = os.urandom(300_000)
FILES = {"m-Q4_0.gguf": WEIGHTS, "m-Q8_0.gguf": WEIGHTS * 2, "README.md": b"hi"}
Start = Callable[..., SmallHub]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(files: dict[str, bytes] | None = None, *, used: bool = True, **how: Any) -> SmallHub:
            hub = stack.enter_context(running(SmallHub(dict(FILES if files is None else files), **how)))
            if used:
                monkeypatch.setenv("HF_ENDPOINT", hub.url)
            return hub

        yield begin


def test_a_model_is_fetched_once(start: Start) -> None:
    hub = start()
    model = locate(NAME)
    assert model.path.read_bytes() == WEIGHTS
    asked = len(hub.asked)
    assert locate(NAME).path == model.path and len(hub.asked) == asked
    assert hub.given == len(WEIGHTS)


def test_it_lies_where_hugging_faces_library_looks(start: Start) -> None:
    start()
    model = locate(NAME)
    folder = cache_root() / "models--org--repo"
    assert model.path == folder / "snapshots" / COMMIT / "m-Q4_0.gguf"
    assert model.path.is_symlink() and model.path.resolve().parent == folder / "blobs"
    assert (folder / "refs" / "main").read_text() == COMMIT


def test_a_cut_download_goes_on_where_it_stopped(start: Start) -> None:
    hub = start(cut=70_000)
    assert locate(NAME).path.read_bytes() == WEIGHTS
    assert hub.given == len(WEIGHTS)


def test_what_an_earlier_run_left_is_taken_over(start: Start) -> None:
    hub = start(cut=0)
    with pytest.raises(ModelFileError, match="Run it again to continue"):
        locate(NAME)
    [part] = (cache_root() / "models--org--repo" / "blobs").glob("*.incomplete")
    part.write_bytes(WEIGHTS[:200_000])
    hub.cut = None
    assert locate(NAME).path.read_bytes() == WEIGHTS
    assert hub.given == 100_000


def test_a_hub_without_ranges_begins_again(start: Start) -> None:
    hub = start(cut=0)
    with pytest.raises(ModelFileError):
        locate(NAME)
    [part] = (cache_root() / "models--org--repo" / "blobs").glob("*.incomplete")
    part.write_bytes(b"x" * 1000)
    hub.cut, hub.no_ranges = None, True
    assert locate(NAME).path.read_bytes() == WEIGHTS


def test_other_contents_than_the_list_says_are_not_kept(start: Start) -> None:
    start(lies=frozenset({"m-Q4_0.gguf"}))
    with pytest.raises(ModelFileError, match="does not match the hub's checksum"):
        locate(NAME)
    assert not list((cache_root() / "models--org--repo" / "blobs").iterdir())
    assert find_cached(NAME) is None


def test_a_damaged_beginning_is_found_at_the_end(start: Start) -> None:
    hub = start(cut=0)
    with pytest.raises(ModelFileError):
        locate(NAME)
    [part] = (cache_root() / "models--org--repo" / "blobs").glob("*.incomplete")
    part.write_bytes(b"x" * 1000)
    hub.cut = None
    with pytest.raises(ModelFileError, match="does not match the hub's checksum"):
        locate(NAME)
    assert locate(NAME).path.read_bytes() == WEIGHTS


def test_a_hub_that_is_busy_is_asked_again(start: Start) -> None:
    hub = start(failing=2)
    assert locate(NAME).path.exists()
    assert len(hub.asked) == 4


def test_a_hub_that_stays_busy_is_told(start: Start) -> None:
    start(failing=99)
    with pytest.raises(ModelFileError, match="503"):
        locate(NAME)


def test_the_token_goes_to_the_hub_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    other = start(used=False)
    other.url = other.url.replace("127.0.0.1", "localhost")
    hub = start(token="secret", elsewhere=other.url)
    assert locate(NAME).path.read_bytes() == WEIGHTS
    assert all(headers["Authorization"] == "Bearer secret" for _, headers in hub.asked)
    assert other.asked and not any("Authorization" in headers for _, headers in other.asked)


def test_what_is_gated_says_how_to_get_in(start: Start) -> None:
    start(token="secret")
    with pytest.raises(ModelFileError, match="HF_TOKEN"):
        locate(NAME)


def test_what_is_not_there(start: Start) -> None:
    start()
    with pytest.raises(ModelFileError, match="has no org/other"):
        locate(ModelName("org/other"))


def test_offline_nothing_is_asked(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFileError, match="HF_HUB_OFFLINE"):
        locate(NAME)
    assert not hub.asked


def test_a_name_that_leads_elsewhere_is_no_file(start: Start, tmp_path: Path) -> None:
    start({"../../evil-Q4_0.gguf": WEIGHTS, "/etc/evil-Q4_0.gguf": WEIGHTS, "a\\b-Q4_0.gguf": WEIGHTS})
    with pytest.raises(ModelFileError, match="use another repository"):
        locate(NAME)
    assert not list(tmp_path.rglob("evil*"))


def test_all_parts_of_a_split_file_come_at_once(start: Start) -> None:
    start({f"m-Q4_0-0000{n}-of-00003.gguf": bytes([n]) * 1000 for n in (1, 2, 3)})
    model = locate(NAME)
    assert model.path.name == "m-Q4_0-00001-of-00003.gguf"
    assert [path.read_bytes()[0] for path in sorted(model.path.parent.iterdir())] == [1, 2, 3]
    assert model.size == 3000


def test_a_folder_of_safetensors(start: Start) -> None:
    start(
        {
            "model.safetensors": WEIGHTS,
            "config.json": b"{}",
            "modeling.py": b"boom",
            "pytorch_model.bin": b"boom",
        }
    )
    model = locate(ModelName("org/repo"))
    assert sorted(path.name for path in model.path.iterdir()) == ["config.json", "model.safetensors"]
    assert (model.path / "config.json").resolve().name == git_id(b"{}")


def test_progress_ends_with_all(start: Start) -> None:
    start()
    items: list[tuple[int, int]] = []
    pull(NAME, lambda done, total: items.append((done, total)))
    assert items[-1] == (len(WEIGHTS), len(WEIGHTS))


def test_removing_frees_what_nothing_else_uses(start: Start) -> None:
    start()
    one, other = locate(NAME), locate(ModelName("org/repo", "Q8_0"))
    assert {str(model.name) for model in list_cached()} == {"hf:org/repo:Q4_0", "hf:org/repo:Q8_0"}
    assert remove(one) == len(WEIGHTS)
    assert [model.name for model in list_cached()] == [other.name]
    assert remove(other) == 2 * len(WEIGHTS)
    assert not (cache_root() / "models--org--repo").exists()


def test_one_that_fails_stops_the_others(start: Start) -> None:
    """Else Ctrl-C would wait for all of them."""
    big = os.urandom(8 << 20)
    files = {"model-00001-of-00002.safetensors": WEIGHTS, "model-00002-of-00002.safetensors": big}
    hub = start(files, lies=frozenset({"model-00001-of-00002.safetensors"}), slow_s=0.01)
    with pytest.raises(ModelFileError, match="does not match the hub's checksum"):
        locate(ModelName("org/repo"))
    assert hub.given < len(big)


def put_into_ollama(root: Path, *place: str) -> Path:
    blob = root / "blobs" / "sha256-abc"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(WEIGHTS)
    manifest = root.joinpath("manifests", *place)
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc", "size": len(WEIGHTS)}
    manifest.write_text(json.dumps({"layers": [layer]}))
    return blob


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (("registry.ollama.ai", "library", "llama3.2", "1b"), "ollama:llama3.2:1b"),
        (("registry.ollama.ai", "me", "mine", "latest"), "ollama:me/mine:latest"),
        (("hf.co", "org", "repo", "Q4_K_M"), "ollama:hf.co/org/repo:Q4_K_M"),
    ],
)
def test_what_ollama_has_is_found(tmp_path: Path, place: tuple[str, ...], text: str) -> None:
    blob = put_into_ollama(tmp_path / "ollama", *place)
    name = parse_name(text)
    assert name is not None and locate(name).path == blob
    assert [str(model.name) for model in list_cached()] == [text]
    assert name.public == text.removeprefix("ollama:")


def test_what_ollama_has_may_be_named_as_ollama_does(tmp_path: Path) -> None:
    put_into_ollama(tmp_path / "ollama", "registry.ollama.ai", "library", "llama3.2", "1b")
    name = resolve_name("llama3.2:1b")
    assert name == ModelName("llama3.2", "1b", kind="ollama")
    assert resolve_name("llama3.2:3b") is None
    with pytest.raises(ModelFileError, match="ollama pull"):
        locate(ModelName("llama3.2", "3b", kind="ollama"))


def test_a_folder_of_models(tmp_path: Path) -> None:
    names = ["a-Q4_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-F16.gguf", "README.md"]
    for name in (*names, "qwen/model.safetensors", "qwen/config.json", "ov/openvino_model.xml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "ov" / "openvino_model.bin").write_bytes(b"12345")
    assert sorted(
        (name, str(path.relative_to(tmp_path)), size) for name, path, size in list_folder(tmp_path)
    ) == [
        ("a-Q4_0", "a-Q4_0.gguf", 5),
        ("b", "b-00001-of-00002.gguf", 10),
        ("ov", "ov", 10),
        ("qwen", "qwen", 10),
    ]


def test_a_projector_comes_with_its_model_and_goes_with_the_last(start: Start) -> None:
    names = {"a-Q4_0.gguf": b"GGUF4", "a-Q8_0.gguf": b"GGUF8888", "mmproj-F16.gguf": b"GGUFeyes"}
    start(names)
    small, large = (pull(ModelName("org/repo", label)) for label in ("Q4_0", "Q8_0"))
    assert small.size == 13
    assert find_projector(large.path) == large.path.with_name("mmproj-F16.gguf")
    remove(small)
    assert find_projector(large.path) is not None
    remove(large)
    assert not large.path.with_name("mmproj-F16.gguf").exists()


def test_a_projector_that_is_not_wanted_is_not_fetched(start: Start) -> None:
    hub = start({"a-Q4_0.gguf": b"GGUF4", "mmproj-F16.gguf": b"GGUFeyes"})
    model = pull(ModelName("org/repo"), projector=False)
    assert (find_projector(model.path), hub.given) == (None, 5)
