"""Registry of all dialects: by name, by alias (the names in other servers), and from a model's own files."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.dialects import catalog
from dragoman.dialects.declarations import Dialect
from dragoman.dialects.response_template import ResponseTemplate
from dragoman.errors import SettingsError

GENERIC = "json"
"""Dialect for models without a call syntax; the prompt asks for calls in it."""
LONGEST_NAME = 128
"""Maximum length of a name. Names may come from clients; longer ones are not compared with all dialects."""


def list_dialects() -> dict[str, Dialect]:
    """Return all dialects by name: `list_dialects()["hermes"].models` names the models that use it."""
    return dict(_catalog())


@cache
def _catalog() -> dict[str, Dialect]:
    """Load the modules of the catalog, each of which has a tuple `DIALECTS`."""
    dialects: dict[str, Dialect] = {}
    for module in iter_modules(catalog.__path__):
        for dialect in import_module(f"{catalog.__name__}.{module.name}").DIALECTS:
            if dialect.name in dialects:
                raise ValueError(f"two dialects are called {dialect.name!r}")
            dialects[dialect.name] = dialect
    return dict(sorted(dialects.items()))


@cache
def _names() -> dict[str, str]:
    names = {_plain(alias): dialect.name for dialect in _catalog().values() for alias in dialect.aliases}
    return names | {_plain(name): name for name in _catalog()}


def get_dialect(name: str) -> Dialect:
    """Return the dialect of a name or an alias: `get_dialect("hermes")`, or `get_dialect("qwen25")`."""
    name = name[:LONGEST_NAME]
    known_name = _names().get(_plain(name))
    if known_name is None:
        near = get_close_matches(_plain(name), _names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"Unknown dialect {name!r}.{hint} Available: {', '.join(_catalog())}.")
    return _catalog()[known_name]


def load_dialect(name: str) -> Dialect:
    """Return a dialect by name, or the one that a file declares; only for callers that
    may name local files.
    """
    if not name.endswith(".json"):
        return get_dialect(name)
    try:
        config = msgspec.json.decode(Path(name).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(
            f"The dialect file {name!r} is not readable JSON; check the path and its contents."
        ) from error
    if not isinstance(config, dict) or "response_template" not in config:
        raise SettingsError(f"{name!r} has no response_template; name the dialect instead.")
    return own_dialect(config)


def own_dialect(config: Mapping[str, Any]) -> Dialect:
    """Load the dialect that a model's `tokenizer_config.json`, or a `response_template` alone, declares."""
    return Dialect(
        name="response_template",
        models="one model, by its own declaration",
        response_template=ResponseTemplate.load(config),
    )


def with_calls(dialect: Dialect) -> Dialect:
    """Return the dialect; if it has no calls, with calls as plain JSON."""
    return dialect if dialect.has_calls else replace(_catalog()[GENERIC], reasoning=dialect.reasoning)


def with_reasoning_of(dialect: Dialect, other: Dialect) -> Dialect:
    """Combine the calls of one dialect with the reasoning of another."""
    if dialect.name == other.name:
        return dialect
    return replace(dialect, name=f"{dialect.name}+{other.name}", reasoning=other.reasoning)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


# Names of models identify their dialect: each dialect declares parts of its models' names.


def match_name(model: str) -> tuple[str, str] | None:
    """Return the longest matching stem: `match_name("Qwen3-Coder-30B")` is
    `("qwen3-coder", "qwen3_coder")`.
    """
    longest = max((stem for stem in _stems() if _contains(model.lower(), stem)), key=len, default=None)
    return None if longest is None else (longest, _stems()[longest])


@cache
def _stems() -> dict[str, str]:
    return {stem: dialect.name for dialect in list_dialects().values() for stem in dialect.stems}


def _contains(model: str, stem: str) -> bool:
    """Whether a name contains a stem: `granite-3` is in `granite-3.3-8b`, not in `granite-34b`. `_` may
    replace `-` or `.`.
    """
    pattern = rf"(?<![a-z0-9]){re.escape(stem)}(?!\d)" + (r"(?!b\b)" if stem[-1].isdigit() else "")
    return any(re.search(pattern, re.sub(r"[\s_]", spelled, model)) for spelled in "-.")
