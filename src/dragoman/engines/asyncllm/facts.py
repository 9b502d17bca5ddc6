"""What an AsyncLLM-shaped engine shows of itself and of its model."""

from typing import Any

from dragoman.engines.asyncllm.request import CONSTRAINTS, Form
from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.protocol import Tokenizer
from dragoman.errors import SettingsError
from dragoman.types import SourceForm

_UNREAD: dict[str, set[SourceForm]] = {
    "none": set(CONSTRAINTS),
    "outlines": {"gbnf", "lark", "structural_tag"},
    # Ours, as it is for the embedded engine, says everything.
    "llguidance": set(CONSTRAINTS) - {"lark"},
}
"""Forms that a backend for constraints does not read; all others know no Lark."""


def manager_of(engine: Any) -> Any:
    """What takes requests: the engine, or its tokenizer manager."""
    for candidate in _parts(engine):
        if hasattr(candidate, "generate_request"):
            return candidate
    raise SettingsError(f"{type(engine).__name__} has no generate_request, so it cannot be served.")


def name_of(engine: Any) -> str:
    return str(_first(engine, "served_model_name", "server_args.served_model_name", "model_path") or "model")


def length_of(engine: Any, tokenizer: Tokenizer) -> int:
    told = _first(engine, "context_len", "model_config.context_len", "max_model_len")
    found = told or getattr(tokenizer, "longest", None)
    if found is None:
        raise SettingsError("The engine does not say how long its context is; give max_model_len.")
    return int(found)


def tokenizer_of(engine: Any, given: Any) -> Tokenizer:
    """What was given, else the engine's own; one of Hugging Face is taken apart."""
    found = given if given is not None else _first(engine, "tokenizer")
    if found is None and hasattr(engine, "get_tokenizer"):
        found = engine.get_tokenizer()
    if found is None:
        raise SettingsError("The engine has no tokenizer; give one.")
    if isinstance(found, Tokenizer):
        return found
    ends, size = _first(engine, "model_config.hf_eos_token_id"), _first(engine, "model_config.vocab_size")
    return HfTokenizer(found, size=size, end_ids=ends or ())


def sources_of(engine: Any, form: Form) -> tuple[SourceForm, ...]:
    """The forms of constraints for which there is a field, as far as the engine's backend reads them."""
    unread = _UNREAD.get(_first(engine, "server_args.grammar_backend"), {"lark"})
    return tuple(
        form_ for form_, field in CONSTRAINTS.items() if field in form.sampling and form_ not in unread
    )


def _parts(engine: Any) -> list[Any]:
    manager = getattr(engine, "tokenizer_manager", None)
    return [engine] if manager is None else [engine, manager]


def _first(engine: Any, *paths: str) -> Any:
    """The first of these attributes that is there and not None."""
    for path in paths:
        for found in _parts(engine):
            for name in path.split("."):
                found = getattr(found, name, None)
            if found is not None:
                return found
    return None
