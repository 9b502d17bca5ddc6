"""Which dialect a model speaks. What is found is said in words, for the log."""

from collections.abc import Collection

from msgspec import Struct

from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import get_dialect
from dragoman.errors import SettingsError
from dragoman.prompt.derive import Examination, examine
from dragoman.prompt.known_models import KNOWN, KNOWN_REASONING, Known, match_name, match_template

PLAIN = Dialect(name="plain", models="Models without tools or reasoning")


class FoundDialect(Struct, frozen=True):
    """A dialect, and how it was found."""

    dialect: Dialect
    how: str

    @property
    def name(self) -> str:
        return self.dialect.name

    def __str__(self) -> str:
        return f"{self.name} ({self.how})"


def find_dialect(
    *,
    template: str | None = None,
    model: str | None = None,
    special_tokens: Collection[str] = (),
    bos_token: str = "",
    eos_token: str = "",
) -> FoundDialect:
    """The dialect of a model, by what is known of it; never an error.

    `find_dialect(model="Qwen3-Coder-30B").dialect.name` is "qwen3_coder", and `how` is
    "the model's name contains qwen3-coder". A chat template says more than a name: a known one is told by its
    markers, an unknown one is rendered with known answers and read off.
    """
    return (
        _by_template(template or "", {"bos_token": bos_token, "eos_token": eos_token}, model)
        or _by_name(model)
        or _by_marks("\0".join(special_tokens), KNOWN, "the model has the tokens")
        or FoundDialect(_named("plain") or PLAIN, "nothing known; text passes through")
    )


def _by_template(source: str, special: dict[str, str], model: str | None) -> FoundDialect | None:
    if not source:
        return None
    marked = _by_marks(source, KNOWN, "the chat template has")
    examined = examine(source, special)
    derived = examined.dialect() if examined is not None else None
    if marked is not None:
        return _checked(marked, examined, derived)
    if derived is not None and derived.calls:
        return FoundDialect(derived, "derived from the chat template")
    # A template that shows only reasoning says nothing of calls; a name may.
    named = _by_name(model)
    if named is not None and named.dialect.calls:
        return named
    reasoning = _by_marks(source, KNOWN_REASONING, "the chat template has")
    if reasoning is not None or derived is None:
        return reasoning
    return FoundDialect(derived, "derived from the chat template")


def _checked(marked: FoundDialect, examined: Examination | None, derived: Dialect | None) -> FoundDialect:
    """Markers can mislead: a template that writes calls which the dialect cannot read is believed instead."""
    if examined is None or derived is None or not derived.calls or not derived.calls[0].open:
        return marked
    if examined.reads(marked.dialect) is not False:
        return marked
    return FoundDialect(derived, f"derived from the chat template; {marked.how}, but it writes other calls")


def _by_marks(text: str, rows: tuple[Known, ...], how: str) -> FoundDialect | None:
    row = match_template(text, rows)
    dialect = _named(row.dialect) if row is not None else None
    if row is None or dialect is None:
        return None
    return FoundDialect(dialect, f"{how} {' and '.join(row.has)}")


def _by_name(model: str | None) -> FoundDialect | None:
    named = match_name(model or "")
    dialect = _named(named[1]) if named is not None else None
    if named is None or dialect is None:
        return None
    return FoundDialect(dialect, f"the model's name contains {named[0]}")


def _named(name: str) -> Dialect | None:
    """A family that the catalog does not hold is none that is known."""
    try:
        return get_dialect(name)
    except SettingsError:
        return None
