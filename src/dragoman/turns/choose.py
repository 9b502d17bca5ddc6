"""Which dialect a server reads: the one that its settings name, or the one that the model shows."""

from collections.abc import Mapping

from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import load_dialect
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.prompt.find import FoundDialect, find_dialect
from dragoman.settings import Settings


def check_names(settings: Settings) -> None:
    """Raises where a name stands for no dialect, before anything is loaded for it."""
    for name in (settings.dialect, settings.tool_call_parser, settings.reasoning_parser):
        if name not in ("auto", None):
            load_dialect(name)


def choose_dialect(
    settings: Settings, card: ModelCard, tokenizer: Tokenizer, template: str | None = None
) -> FoundDialect:
    """What the settings name, else what template, tokens and name of the model speak for."""
    found = _named(settings) or find_dialect(
        template=template if template is not None else _usual(card.templates),
        model=card.name,
        special_tokens=tokenizer.special,
        bos_token=_text(tokenizer, tokenizer.bos_id),
        eos_token=_text(tokenizer, tokenizer.eos_id),
    )
    if settings.reasoning_parser is None:
        return found
    return replace(found, dialect=with_reasoning_of(found.dialect, load_dialect(settings.reasoning_parser)))


def _named(settings: Settings) -> FoundDialect | None:
    if settings.tool_call_parser is not None:
        return FoundDialect(load_dialect(settings.tool_call_parser), "set as tool_call_parser")
    return (
        None if settings.dialect == "auto" else FoundDialect(load_dialect(settings.dialect), "set as dialect")
    )


def _usual(templates: Mapping[str, str]) -> str | None:
    """The template in which tools would be shown to the model."""
    names = [name for name in ("tool_use", "default") if name in templates] or list(templates)
    return templates[names[0]] if names else None


def _text(tokenizer: Tokenizer, id_: int | None) -> str:
    return "" if id_ is None else tokenizer.pieces[id_].decode("utf-8", "replace")


def with_reasoning_of(dialect: Dialect, other: Dialect) -> Dialect:
    """Calls as in the one, reasoning as in the other."""
    if dialect.name == other.name:
        return dialect
    return replace(dialect, name=f"{dialect.name}+{other.name}", reasoning=other.reasoning)
