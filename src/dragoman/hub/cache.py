"""Models on this machine: Hugging Face's cache, which other programs also use, and Ollama's store.

The cache has Hugging Face's layout, so that nothing is stored twice: `models--ORG--REPO/blobs/` has the
contents by checksum, `snapshots/COMMIT/` the file names as links to them, `refs/main` the latest downloaded
commit.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.errors import ModelFileError
from dragoman.hub.names import (
    SPLIT,
    ModelName,
    ModelVariant,
    RepoFile,
    choose_variant,
    list_variants,
    parse_name,
)

MOST_MANIFEST_BYTES = 1 << 20
_WEIGHTS = "application/vnd.ollama.image.model"
UNBOUNDED = 1 << 62


class CachedModel(Struct, frozen=True):
    name: ModelName
    path: Path
    """File or folder to serve."""
    size: int
    used: float
    """Time of the last access, in seconds."""


def cache_root() -> Path:
    """Return the cache folder of Hugging Face's own library."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    return home() / "hub"


def home() -> Path:
    if value := os.environ.get("HF_HOME"):
        return Path(value).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(general).expanduser() / "huggingface"


def repo_folder(repo: str) -> Path:
    return cache_root() / f"models--{repo.replace('/', '--')}"


def resolve_name(text: str) -> ModelName | None:
    """Parse a model's name, including a short one that only Ollama knows, such as `llama3.2:1b`, if Ollama
    has it.

    Return None if the text is a file or a folder.
    """
    if (name := parse_name(text)) or "/" in text or Path(text).exists():
        return name
    try:
        name = parse_name(f"ollama:{text}")
    except ModelFileError:
        return None
    return name if name and _find_in_ollama(name) else None


def find_cached(name: ModelName) -> CachedModel | None:
    """Return the model if it is complete on this machine; of several quantizations the named one, or the
    largest.
    """
    if name.kind == "ollama":
        return _find_in_ollama(name)
    snapshot = _snapshot(repo_folder(name.repo), name.revision)
    variants = list_variants(_list_files(snapshot)) if snapshot else []
    try:
        chosen = choose_variant(variants, name, UNBOUNDED)
    except ModelFileError:
        return None
    return _describe(name.repo, snapshot, chosen) if snapshot else None


def list_cached() -> list[CachedModel]:
    """List all models in the hub's cache and in Ollama's store."""
    models = []
    for folder in sorted(cache_root().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = _snapshot(folder, "main")
        if snapshot is not None:
            models += [_describe(repo, snapshot, variant) for variant in list_variants(_list_files(snapshot))]
    return models + [model for name in _list_ollama() if (model := _find_in_ollama(name))]


def list_folder(folder: Path) -> list[tuple[str, Path, int]]:
    """List the models in a folder, with name, path and bytes: GGUF files (split ones as one), and folders of
    weights.

    `models/a-Q4_0.gguf` is `a-Q4_0`; `models/qwen/` with safetensors is `qwen`.
    """
    items = []
    for target in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        files = [
            RepoFile(path.name, path.stat().st_size) for path in sorted(target.iterdir()) if path.is_file()
        ]
        for variant in list_variants(files):
            first = target / variant.first.name
            path = first if variant.is_gguf else target
            name = SPLIT.sub("", first.name).removesuffix(".gguf") if variant.is_gguf else target.name
            items.append((name, path, variant.size))
    return items


def remove(model: CachedModel) -> int:
    """Delete a model and return the bytes freed. Contents that other names refer to stay."""
    if model.name.kind == "ollama":
        raise ModelFileError(f"{model.name} belongs to Ollama; delete it with `ollama rm`.")
    folder = repo_folder(model.name.repo)
    links = model.path.parent.glob("*") if model.path.is_file() else model.path.rglob("*")
    chosen = [link for link in links if _belongs(link, model)]
    blobs = {link.resolve() for link in chosen if link.is_symlink()}
    for link in chosen:
        link.unlink()
    left = {link.resolve() for link in (folder / "snapshots").rglob("*") if link.is_symlink()}
    freed = 0
    for blob in blobs - left:
        freed += blob.stat().st_size
        blob.unlink()
    if not left:
        shutil.rmtree(folder, ignore_errors=True)
    return freed


def _belongs(link: Path, model: CachedModel) -> bool:
    if not model.path.is_file():
        return link.is_symlink() or link.is_file()
    variants = list_variants(_list_files(model.path.parent))
    mine = {
        file.name
        for variant in variants
        for file in variant.all_files
        if variant.first.name == model.path.name
    }
    others = {
        file.name
        for variant in variants
        for file in variant.all_files
        if variant.first.name != model.path.name
    }
    return link.name in mine - others


def find_projector(model: Path) -> Path | None:
    """Return the projector next to a model's file, if there is one."""
    for variant in list_variants(_list_files(model.parent, "*")):
        if variant.first.name == model.name and variant.projector is not None:
            return model.parent / variant.projector.name
    return None


def _snapshot(folder: Path, revision: str) -> Path | None:
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _list_files(snapshot: Path, pattern: str = "**/*") -> Iterator[RepoFile]:
    for path in sorted(snapshot.glob(pattern)):
        # A link whose target is gone does not count as a file.
        if path.is_file():
            yield RepoFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)


def _describe(repo: str, snapshot: Path, variant: ModelVariant) -> CachedModel:
    first = snapshot / variant.first.name
    path = first if variant.is_gguf else snapshot
    return CachedModel(ModelName(repo, variant.label), path, variant.size, first.stat().st_atime)


# Ollama's store


def _ollama_root() -> Path:
    return Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()


_OLLAMA_HOST, _OLLAMA_OWNER = "registry.ollama.ai", "library"
"""Defaults for the parts that a short name omits."""


def _manifests() -> Path:
    return _ollama_root() / "manifests"


def _list_ollama() -> Iterator[ModelName]:
    for path in sorted(_manifests().glob("*/*/*/*")):
        host, owner, model, tag = path.relative_to(_manifests()).parts
        parts = [*([] if host == _OLLAMA_HOST else [host]), owner, model]
        short = parts[1:] if parts[0] == _OLLAMA_OWNER else parts
        yield ModelName("/".join(short), tag, kind="ollama")


def _find_in_ollama(name: ModelName) -> CachedModel | None:
    host, owner, model = [*(_OLLAMA_HOST, _OLLAMA_OWNER)[: 2 - name.repo.count("/")], *name.repo.split("/")]
    manifest = _read_manifest(_manifests() / host / owner / model / (name.selector or "latest"))
    for layer in manifest.get("layers") or ():
        digest = str(layer.get("digest", "")).replace(":", "-")
        blob = _ollama_root() / "blobs" / digest
        if layer.get("mediaType") == _WEIGHTS and "/" not in digest and blob.is_file():
            return CachedModel(name, blob, blob.stat().st_size, blob.stat().st_atime)
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            return {}
        manifest = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return manifest if isinstance(manifest, dict) else {}
