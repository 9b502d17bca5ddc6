"""All dialects: by name, by the names that other servers gave them, and out of a model's own files."""

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
from dragoman.dialects.declare import Dialect
from dragoman.dialects.response_template import ResponseTemplate
from dragoman.errors import SettingsError

GENERIC = "json"
"""How a model is asked to write calls that knows no way of its own."""
LONGEST_NAME = 128
"""A client may have sent it: what is longer is none, and is not compared with all that there are."""


def list_dialects() -> dict[str, Dialect]:
    """Every dialect under its own name: `list_dialects()["hermes"].models` says who speaks it."""
    return dict(_catalog())


@cache
def _catalog() -> dict[str, Dialect]:
    """A file of the catalog holds one or a few in `DIALECTS`."""
    found: dict[str, Dialect] = {}
    for module in iter_modules(catalog.__path__):
        for dialect in import_module(f"{catalog.__name__}.{module.name}").DIALECTS:
            if dialect.name in found:
                raise ValueError(f"two dialects are called {dialect.name!r}")
            found[dialect.name] = dialect
    return dict(sorted(found.items()))


@cache
def _names() -> dict[str, str]:
    names = {_plain(alias): dialect.name for dialect in _catalog().values() for alias in dialect.aliases}
    return names | {_plain(name): name for name in _catalog()}


def get_dialect(name: str) -> Dialect:
    """`get_dialect("hermes")`, also `get_dialect("qwen25")`: the dialect of a name or an alias."""
    name = name[:LONGEST_NAME]
    found = _names().get(_plain(name))
    if found is None:
        near = get_close_matches(_plain(name), _names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"There is no dialect {name!r}.{hint} There are: {', '.join(_catalog())}.")
    return _catalog()[found]


def load_dialect(name: str) -> Dialect:
    """A dialect by name, or the one that a file declares: for those who may name files of this machine."""
    if not name.endswith(".json"):
        return get_dialect(name)
    try:
        config = msgspec.json.decode(Path(name).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"The dialect {name!r} cannot be read as a file of JSON.") from error
    if not isinstance(config, dict) or "response_template" not in config:
        raise SettingsError(f"{name!r} has no response_template; name the dialect instead.")
    return own_dialect(config)


def own_dialect(config: Mapping[str, Any]) -> Dialect:
    """What a model's `tokenizer_config.json`, or its `response_template` alone, declares."""
    return Dialect(
        name="response_template",
        models="one model, by its own declaration",
        own=ResponseTemplate.load(config),
    )


def with_calls(dialect: Dialect) -> Dialect:
    """The dialect, with calls as plain JSON if it has none."""
    return dialect if dialect.has_calls else replace(_catalog()[GENERIC], reasoning=dialect.reasoning)


def with_reasoning_of(dialect: Dialect, other: Dialect) -> Dialect:
    """Calls as in the one, reasoning as in the other."""
    if dialect.name == other.name:
        return dialect
    return replace(dialect, name=f"{dialect.name}+{other.name}", reasoning=other.reasoning)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


# The names of models say which dialect they speak: each declares what those of its models have in them.


def match_name(model: str) -> tuple[str, str] | None:
    """The longest stem that fits: `match_name("Qwen3-Coder-30B")` is `("qwen3-coder", "qwen3_coder")`."""
    longest = max((stem for stem in _stems() if _contains(model.lower(), stem)), key=len, default=None)
    return None if longest is None else (longest, _stems()[longest])


@cache
def _stems() -> dict[str, str]:
    return {stem: dialect.name for dialect in list_dialects().values() for stem in dialect.stems}


def _contains(model: str, stem: str) -> bool:
    """`granite-3` is in `granite-3.3-8b`, but not in `granite-34b`. Some write `_` for `-` or `.`."""
    pattern = rf"(?<![a-z0-9]){re.escape(stem)}(?!\d)" + (r"(?!b\b)" if stem[-1].isdigit() else "")
    return any(re.search(pattern, re.sub(r"[\s_]", spelled, model)) for spelled in "-.")
