"""What a person may call a model, and which of a repository's files are meant by it.

hf:org/repo:Q4_K_M         a repository of a hub, in one quantisation
org/repo                   the same without one: the best that fits into memory
hf.co/org/repo             as copied from a browser, with or without https://
ollama:llama3.2:1b         what Ollama has pulled; from elsewhere than its library as ollama:hf.co/org/repo
org/repo/file.gguf         one file of a repository
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
    choice: str = ""
    """A quantisation or a file; empty for whichever fits best."""
    revision: str = "main"
    kind: Literal["hub", "ollama"] = "hub"

    def __str__(self) -> str:
        return f"{'hf' if self.kind == 'hub' else 'ollama'}:{self.repo}" + (self.choice and f":{self.choice}")

    @property
    def public(self) -> str | None:
        """What clients call it, where its files are named after their contents: `llama3.2:1b`, `org/repo`."""
        if self.kind == "ollama":
            return f"{self.repo}:{self.choice}"
        return None if self.choice.lower() not in FOLDERS else self.repo


def read_name(text: str) -> ModelName | None:
    """None where it is no name, but a file or a folder.

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
    plain = _IN_BROWSER.sub(lambda found: f"@{found[1]}/{found[2]}".rstrip("/"), plain.rstrip("/"))
    found = _REPO.fullmatch(plain)
    if found is None or ".." in plain:
        if marked:
            raise ModelFileError(
                f"`{text[:200]}` is no name of a model; one is hf:ORG/REPO or hf:ORG/REPO:Q4_K_M."
            )
        return None
    repo, revision, quantisation, file = found.groups()
    return ModelName(repo, quantisation or file or "", revision or "main")


def _read_ollama(text: str) -> ModelName:
    found = _OLLAMA.fullmatch(text)
    if found is None:
        raise ModelFileError(f"`ollama:{text[:200]}` is no name of a model; one is ollama:llama3.2:1b.")
    return ModelName(found[1], found[2] or "latest", kind="ollama")


# Which files of a repository.


FOLDERS = ("safetensors", "openvino")
"""Variants that are a folder of files."""


class RemoteFile(Struct, frozen=True):
    name: str
    """Its path in the repository, with / between folders."""
    size: int
    sha256: str | None = None
    """Of large files; small ones have the name that git gives their contents."""
    git_id: str | None = None

    @property
    def etag(self) -> str:
        return self.sha256 or self.git_id or ""


class Variant(Struct, frozen=True):
    """What can be served of a repository: all files that belong together."""

    label: str
    """`Q4_K_M`, or `safetensors`."""
    files: Sequence[RemoteFile]
    projector: RemoteFile | None = None
    """What it sees or hears with: a file that others of the repository may have as well."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.all_files)

    @property
    def all_files(self) -> Sequence[RemoteFile]:
        return self.files if self.projector is None else [*self.files, self.projector]

    @property
    def first(self) -> RemoteFile:
        """The one that names them all: of a split file its first part."""
        return self.files[0]

    @property
    def is_gguf(self) -> bool:
        return self.first.name.endswith(".gguf")


SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.(?:gguf|safetensors)$)")
"""In the names of files that are parts of one."""
_QUANTISATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|T?Q\d_\w+|MXFP4\w*|NVFP4\w*|BF16|F16|F32|FP16|FP32))$", re.IGNORECASE
)
_NOT_WEIGHTS = re.compile(r"(?:^|/)(?:imatrix|ggml-vocab)[^/]*$", re.IGNORECASE)
_PROJECTOR = re.compile(r"(?:^|/)(?:[^/]*[-._])?mmproj(?=[-._])[^/]*\.gguf$", re.IGNORECASE)
_BEST_PROJECTORS = ("F16", "FP16", "BF16", "Q8_0", "F32", "FP32")
_FULL = frozenset({"BF16", "F16", "F32", "FP16", "FP32"})
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""What a folder of weights may have beside them. No program, and nothing that is unpickled."""


def list_variants(files: Iterable[RemoteFile]) -> list[Variant]:
    """Smallest first; what is incomplete is none."""
    files = list(files)
    found = [*_list_gguf(files)]
    for label, is_weights in zip(FOLDERS, (_is_safetensors, _is_openvino), strict=True):
        weights = [file for file in files if is_weights(file.name)]
        if weights and _is_whole(weights, label):
            beside = [file for file in files if _is_beside(file.name, weights[0].name)]
            found.append(Variant(label, [*weights, *beside]))
    return sorted(found, key=lambda variant: variant.size)


def _list_gguf(files: Sequence[RemoteFile]) -> Iterable[Variant]:
    groups: dict[str, list[RemoteFile]] = {}
    for file in files:
        if file.name.endswith(".gguf") and not (
            _NOT_WEIGHTS.search(file.name) or _PROJECTOR.search(file.name)
        ):
            groups.setdefault(SPLIT.sub("", file.name), []).append(file)
    for name, parts in groups.items():
        parts.sort(key=lambda part: part.name)
        if _is_whole(parts, "gguf"):
            yield Variant(quantisation(name), parts, _choose_projector(files, parts[0].name, groups))


def _choose_projector(files: Sequence[RemoteFile], model: str, models: Iterable[str]) -> RemoteFile | None:
    """The projector beside a model, or else at the top: one of its name, or any if there is no other model.

    `mmproj-SmolVLM-F16.gguf` is of `SmolVLM-Q4_K_M.gguf`, and `mmproj-F16.gguf` of whatever is alone there.
    """
    found = [file for file in files if _PROJECTOR.search(file.name)]
    folder = model.rpartition("/")[0]
    beside = [file for file in found if file.name.rpartition("/")[0] == folder]
    beside = beside or [file for file in found if "/" not in file.name]
    named = [file for file in beside if _stem(file.name) == _stem(model)]
    if not named and len({_stem(each) for each in models}) > 1:
        return None
    return min(named or beside, key=_rank_projector, default=None)


def _stem(file: str) -> str:
    """What model a file is of: `_stem("mmproj-SmolVLM-F16.gguf")` is `smolvlm`."""
    stem = SPLIT.sub("", file.rpartition("/")[2]).removesuffix(".gguf")
    return re.sub(r"(?:^|[-._])mmproj(?=[-._]|$)", "", _QUANTISATION.sub("", stem)).strip("-._").lower()


def _rank_projector(file: RemoteFile) -> tuple[int, int]:
    label = quantisation(file.name)
    return _BEST_PROJECTORS.index(label) if label in _BEST_PROJECTORS else len(_BEST_PROJECTORS), file.size


def _is_whole(weights: Sequence[RemoteFile], label: str) -> bool:
    """Whether all parts are there that their names tell of."""
    if label == "openvino":
        return len(weights) == 2
    split = [found for file in weights if (found := SPLIT.search(file.name))]
    return not split or len({found[1] for found in split}) == int(split[0][2])


def quantisation(file: str) -> str:
    """`quantisation("a/Model-Q4_K_M.gguf")` is `Q4_K_M`; the file's own name where it does not say."""
    stem = SPLIT.sub("", file).removesuffix(".gguf")
    found = _QUANTISATION.search(stem)
    return found[1].upper() if found else stem.rpartition("/")[2]


def _is_safetensors(name: str) -> bool:
    others = ("adapter", "consolidated")
    return name.endswith(".safetensors") and "/" not in name and not name.startswith(others)


def _is_openvino(name: str) -> bool:
    return name in ("openvino_model.xml", "openvino_model.bin")


def _is_beside(name: str, weights: str) -> bool:
    return "/" not in name and name.endswith(_BESIDE_WEIGHTS) and name != weights


def choose_variant(
    variants: Sequence[Variant], name: ModelName, room: int, files: Iterable[RemoteFile] = ()
) -> Variant:
    """The one that is named, or the best that fits into so many bytes. `files` are all, for the error."""
    if not variants:
        pickled = any(file.name.endswith(_PICKLED) for file in files)
        what = "only weights that would have to be unpickled, which can run anything" if pickled else (
            "neither a GGUF file nor safetensors, or not all parts")  # fmt: skip
        raise ModelFileError(f"{name.repo} has {what}: nothing can be served.")
    if name.choice:
        return _named(variants, name)
    usual = _usual(variants)
    fitting = [one for one in usual if one.size <= room]
    if not fitting:
        least = usual[0]
        raise ModelFileError(
            f"Nothing of {name.repo} fits into the memory that is free ({room / 1e9:.1f} GB): the smallest, "
            f"{least.label}, has {least.size / 1e9:.1f} GB. To try it all the same: {name}:{least.label}."
        )
    return fitting[-1]


def _usual(variants: Sequence[Variant]) -> list[Variant]:
    """The kind that is served where none is named. What the embedded engine runs comes first."""
    files = [one for one in variants if one.is_gguf]
    # Weights of 16 bits and more say nothing that those of 8 do not, and take twice the time.
    quantised = [one for one in files if one.label not in _FULL]
    folders = sorted((one for one in variants if not one.is_gguf), key=lambda one: one.label)
    return quantised or files or folders[:1]


def _named(variants: Sequence[Variant], name: ModelName) -> Variant:
    asked = name.choice.lower()
    for one in variants:
        if asked in (one.label.lower(), one.first.name.lower(), one.first.name.rpartition("/")[2].lower()):
            return one
    there = ", ".join(one.label for one in variants)
    raise ModelFileError(f"{name.repo} has no {name.choice}; it has: {there}.")
