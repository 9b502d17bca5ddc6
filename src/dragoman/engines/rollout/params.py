"""Sampling as executors take it: a dict with vLLM's names."""

from collections.abc import Collection
from typing import Any

from dragoman.engines.protocol import UNSUPPORTABLE
from dragoman.types import Sampling

HONOURED = UNSUPPORTABLE - {
    "typical_p",
    "bad_words",
    "prompt_logprobs",
    "priority",
    "cache_salt",
    "reuse_prefix",
}
"""What a vLLM-shaped executor usually can do."""
_ALWAYS = ("temperature", "top_p")
_UNASKED = Sampling(max_tokens=0)


def params_of(sampling: Sampling, ends: frozenset[int], honoured: Collection[str]) -> dict[str, Any]:
    """What was asked, and nothing that was not: an executor has defaults of its own for the rest."""
    asked: dict[str, Any] = {"max_tokens": sampling.max_tokens}
    for name in sorted(honoured):
        value = getattr(sampling, name)
        if name in _ALWAYS or value != getattr(_UNASKED, name):
            asked[name] = _plain(value)
    if "stop_token_ids" in honoured and not sampling.ignore_eos:
        # Executors know one end of their own; the model may have several.
        asked["stop_token_ids"] = sorted(sampling.stop_token_ids | ends)
    return asked


def _plain(value: Any) -> Any:
    """Sets and tuples as lists, in an order that is always the same."""
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value
