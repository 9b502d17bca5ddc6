"""All dialects, by name and by the names that other servers gave them."""

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from msgspec.structs import replace

from dragoman.dialects import catalog
from dragoman.dialects.declare import Dialect
from dragoman.errors import SettingsError

GENERIC = "json"
"""How a model is asked to write calls that knows no way of its own."""


@cache
def dialects() -> dict[str, Dialect]:
    """Every dialect under its own name. A file of the catalog holds one or a few in `DIALECTS`."""
    found: dict[str, Dialect] = {}
    for module in iter_modules(catalog.__path__):
        for dialect in import_module(f"{catalog.__name__}.{module.name}").DIALECTS:
            if dialect.name in found:
                raise ValueError(f"two dialects are called {dialect.name!r}")
            found[dialect.name] = dialect
    return dict(sorted(found.items()))


LONGEST_NAME = 128
"""A client may have sent it: what is longer is none, and is not compared with all that there are."""


@cache
def _names() -> dict[str, str]:
    names = {_plain(alias): dialect.name for dialect in dialects().values() for alias in dialect.aliases}
    return names | {_plain(name): name for name in dialects()}


def get(name: str) -> Dialect:
    """`get("hermes")`, also `get("qwen25")`: the dialect of a name or an alias."""
    name = name[:LONGEST_NAME]
    found = _names().get(_plain(name))
    if found is None:
        near = get_close_matches(_plain(name), _names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"There is no dialect {name!r}.{hint} There are: {', '.join(dialects())}.")
    return dialects()[found]


def with_calls(dialect: Dialect) -> Dialect:
    """The dialect, with calls as plain JSON if it has none."""
    return dialect if dialect.has_calls else replace(dialects()[GENERIC], reasoning=dialect.reasoning)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
