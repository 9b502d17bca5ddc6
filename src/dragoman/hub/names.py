"""Model names, and the files of a repository that a name selects.

hf:org/repo:Q4_K_M         a repository of a hub, in one quantization org/repo                   without
quantization: the best that fits into memory hf.co/org/repo             as copied from a browser, with or
without https:// ollama:llama3.2:1b         a model that Ollama has pulled; from other hosts as
ollama:hf.co/org/repo org/repo/file.gguf         one file of a repository
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from dragoman.errors import ModelFileError

HOSTS = ("huggingface.co/", "hf.co/", "www.huggingface.co/")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPO = re.compile(rf"({_PART}/{_PART})(?:@({_PART}))?(?::([^/:]+)|/((?:[^/]+/)*[^/]+\.gguf))?")
_OLLAMA = re.compile(rf"({_PART}(?:/{_PART}){{0,2}})(?::({_PART}))?")
_IN_BROWSER = re.compile(r"/(?:blob|resolve|tree)/([^/]+)/?(.*)")


class ModelName(Struct, frozen=True):
    repo: str
    selector: str = ""
    """A quantization or a file; empty for the best that fits."""
    revision: str = "main"
    kind: Literal["hub", "ollama"] = "hub"

    def __str__(self) -> str:
        return f"{'hf' if self.kind == 'hub' else 'ollama'}:{self.repo}" + (
            self.selector and f":{self.selector}"
        )

    @property
    def public(self) -> str | None:
        """Name for clients, for models whose files are named after their contents:
        `llama3.2:1b`, `org/repo`.
        """
        if self.kind == "ollama":
            return f"{self.repo}:{self.selector}"
        return None if self.selector.lower() not in FOLDERS else self.repo


def parse_name(text: str) -> ModelName | None:
    """Parse a model's name; return None if it is a file or a folder.

    >>> read_name("hf:org/repo:Q4_K_M")
    ModelName(repo='org/repo', choice='Q4_K_M', revision='main', kind='hub')
    """
    if text.startswith("ollama:"):
        return _read_ollama(text.removeprefix("ollama:"))
    plain = text.removeprefix("https://").removeprefix("http://")
    marked = text.startswith("hf:") or plain.startswith(HOSTS)
    if not marked and (Path(text).expanduser().exists() or text.endswith(".gguf") or text[:1] in "./~"):
        return None
    for host in (*HOSTS, "hf:"):
        plain = plain.removeprefix(host)
    plain = _IN_BROWSER.sub(lambda match: f"@{match[1]}/{match[2]}".rstrip("/"), plain.rstrip("/"))
    matched = _REPO.fullmatch(plain)
    if matched is None or ".." in plain:
        if marked:
            raise ModelFileError(
                f"`{text[:200]}` is not a valid model name; use hf:ORG/REPO or hf:ORG/REPO:Q4_K_M."
            )
        return None
    repo, revision, quantisation, file = matched.groups()
    return ModelName(repo, quantisation or file or "", revision or "main")


def _read_ollama(text: str) -> ModelName:
    match = _OLLAMA.fullmatch(text)
    if match is None:
        raise ModelFileError(
            f"`ollama:{text[:200]}` is not a valid model name; use a form such as ollama:llama3.2:1b."
        )
    return ModelName(match[1], match[2] or "latest", kind="ollama")


# Selection of a repository's files


FOLDERS = ("safetensors", "openvino")
"""Variants that are folders of files."""


class RepoFile(Struct, frozen=True):
    name: str
    """Path in the repository, with / between folders."""
    size: int
    sha256: str | None = None
    """Checksum of large files; small ones have git's object id."""
    git_id: str | None = None

    @property
    def etag(self) -> str:
        return self.sha256 or self.git_id or ""


class ModelVariant(Struct, frozen=True):
    """A servable variant of a repository: all files that belong together."""

    label: str
    """Label, such as `Q4_K_M` or `safetensors`."""
    files: Sequence[RepoFile]
    projector: RepoFile | None = None
    """Projector for images or audio; variants may share it."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.all_files)

    @property
    def all_files(self) -> Sequence[RepoFile]:
        return self.files if self.projector is None else [*self.files, self.projector]

    @property
    def first(self) -> RepoFile:
        """File that identifies the variant: of a split file, the first shard."""
        return self.files[0]

    @property
    def is_gguf(self) -> bool:
        return self.first.name.endswith(".gguf")


SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.(?:gguf|safetensors)$)")
"""Suffix in the names of shards."""
_QUANTISATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|T?Q\d_\w+|MXFP4\w*|NVFP4\w*|BF16|F16|F32|FP16|FP32))$", re.IGNORECASE
)
_NOT_WEIGHTS = re.compile(r"(?:^|/)(?:imatrix|ggml-vocab)[^/]*$", re.IGNORECASE)
_PROJECTOR = re.compile(r"(?:^|/)(?:[^/]*[-._])?mmproj(?=[-._])[^/]*\.gguf$", re.IGNORECASE)
_BEST_PROJECTORS = ("F16", "FP16", "BF16", "Q8_0", "F32", "FP32")
_FULL = frozenset({"BF16", "F16", "F32", "FP16", "FP32"})
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Files that a folder of weights may also contain: no programs, and nothing that is unpickled."""


def list_variants(files: Iterable[RepoFile]) -> list[ModelVariant]:
    """List the complete variants, smallest first."""
    files = list(files)
    variants = [*_list_gguf(files)]
    for label, is_weights in zip(FOLDERS, (_is_safetensors, _is_openvino), strict=True):
        weights = [file for file in files if is_weights(file.name)]
        if weights and _is_whole(weights, label):
            beside = [file for file in files if _is_beside(file.name, weights[0].name)]
            variants.append(ModelVariant(label, [*weights, *beside]))
    return sorted(variants, key=lambda variant: variant.size)


def _list_gguf(files: Sequence[RepoFile]) -> Iterable[ModelVariant]:
    groups: dict[str, list[RepoFile]] = {}
    for file in files:
        if file.name.endswith(".gguf") and not (
            _NOT_WEIGHTS.search(file.name) or _PROJECTOR.search(file.name)
        ):
            groups.setdefault(SPLIT.sub("", file.name), []).append(file)
    for name, parts in groups.items():
        parts.sort(key=lambda part: part.name)
        if _is_whole(parts, "gguf"):
            yield ModelVariant(quantization(name), parts, _choose_projector(files, parts[0].name, groups))


def _choose_projector(files: Sequence[RepoFile], model: str, models: Iterable[str]) -> RepoFile | None:
    """Return the projector in the model's folder, or else at the top: one with its name, or any if there is
    one model.

    `mmproj-SmolVLM-F16.gguf` belongs to `SmolVLM-Q4_K_M.gguf`, `mmproj-F16.gguf` to the only model there.
    """
    repo_files = [file for file in files if _PROJECTOR.search(file.name)]
    folder = model.rpartition("/")[0]
    beside = [file for file in repo_files if file.name.rpartition("/")[0] == folder]
    beside = beside or [file for file in repo_files if "/" not in file.name]
    named = [file for file in beside if _stem(file.name) == _stem(model)]
    if not named and len({_stem(other) for other in models}) > 1:
        return None
    return min(named or beside, key=_rank_projector, default=None)


def _stem(file: str) -> str:
    """Return the model that a file belongs to: `_stem("mmproj-SmolVLM-F16.gguf")` is `smolvlm`."""
    stem = SPLIT.sub("", file.rpartition("/")[2]).removesuffix(".gguf")
    return re.sub(r"(?:^|[-._])mmproj(?=[-._]|$)", "", _QUANTISATION.sub("", stem)).strip("-._").lower()


def _rank_projector(file: RepoFile) -> tuple[int, int]:
    label = quantization(file.name)
    return _BEST_PROJECTORS.index(label) if label in _BEST_PROJECTORS else len(_BEST_PROJECTORS), file.size


def _is_whole(weights: Sequence[RepoFile], label: str) -> bool:
    """Whether all shards that the names indicate are there."""
    if label == "openvino":
        return len(weights) == 2
    split = [match for file in weights if (match := SPLIT.search(file.name))]
    return not split or len({matched[1] for matched in split}) == int(split[0][2])


def quantization(file: str) -> str:
    """Return the quantization: `quantization("a/Model-Q4_K_M.gguf")` is `Q4_K_M`; without one, the file's
    name.
    """
    stem = SPLIT.sub("", file).removesuffix(".gguf")
    match = _QUANTISATION.search(stem)
    return match[1].upper() if match else stem.rpartition("/")[2]


def _is_safetensors(name: str) -> bool:
    others = ("adapter", "consolidated")
    return name.endswith(".safetensors") and "/" not in name and not name.startswith(others)


def _is_openvino(name: str) -> bool:
    return name in ("openvino_model.xml", "openvino_model.bin")


def _is_beside(name: str, weights: str) -> bool:
    return "/" not in name and name.endswith(_BESIDE_WEIGHTS) and name != weights


def choose_variant(
    variants: Sequence[ModelVariant], name: ModelName, room: int, files: Iterable[RepoFile] = ()
) -> ModelVariant:
    """Return the named variant, or the best that fits into `room` bytes. `files` are all files, for the
    error.
    """
    if not variants:
        pickled = any(file.name.endswith(_PICKLED) for file in files)
        what = "only pickled weights, which can execute code" if pickled else (
            "no complete GGUF or safetensors files")  # fmt: skip
        raise ModelFileError(f"{name.repo} has {what}; use another repository.")
    if name.selector:
        return _named(variants, name)
    usual = _usual(variants)
    fitting = [variant for variant in usual if variant.size <= room]
    if not fitting:
        least = usual[0]
        raise ModelFileError(
            f"No variant of {name.repo} fits into the free memory ({room / 1e9:.1f} GB): the smallest, "
            f"{least.label}, has {least.size / 1e9:.1f} GB. To use it anyway, name {name}:{least.label}."
        )
    return fitting[-1]


def _usual(variants: Sequence[ModelVariant]) -> list[ModelVariant]:
    """Return the variants to choose from if none is named; those that the embedded engine runs come first."""
    files = [variant for variant in variants if variant.is_gguf]
    # 16-bit weights are hardly better than 8-bit ones, and take twice the time.
    quantised = [variant for variant in files if variant.label not in _FULL]
    folders = sorted(
        (variant for variant in variants if not variant.is_gguf), key=lambda variant: variant.label
    )
    return quantised or files or folders[:1]


def _named(variants: Sequence[ModelVariant], name: ModelName) -> ModelVariant:
    wanted = name.selector.lower()
    for variant in variants:
        if wanted in (
            variant.label.lower(),
            variant.first.name.lower(),
            variant.first.name.rpartition("/")[2].lower(),
        ):
            return variant
    available = ", ".join(variant.label for variant in variants)
    raise ModelFileError(f"{name.repo} has no {name.selector}; available: {available}.")
