"""Usage as Chat Completions and Completions spell it."""

from typing import Any

from dragoman.types import Usage


def usage(counted: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
    }
