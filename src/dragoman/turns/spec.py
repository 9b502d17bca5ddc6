"""What a client asked, whatever API it came through."""

from typing import Any

from msgspec import Struct

from dragoman.types import Prompt, Sampling


class Reading(Struct, frozen=True, kw_only=True):
    """What is to be found in an answer, in the model's dialect."""

    tools: tuple[dict[str, Any], ...] = ()
    """Values of a call get their types from these."""
    calls: bool = True
    """If not, a call is text."""
    reasoning: bool = True
    """If not, reasoning is text."""
    most_calls: int | None = None
    """The answer ends where a further call begins."""


class TurnSpec(Struct, frozen=True, kw_only=True):
    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    """`max_tokens` 0 means as many as the context holds; `bad_words` come as text, below."""
    reading: Reading | None = None
    """None: the answer is text and nothing else."""
    n: int = 1
    """Continuations to compute for each prompt."""
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    truncate_prompt: int | None = None
    """Keep this many of the prompt's last ids; -1 means as many as the model takes."""
    priority: int = 0
    cache_salt: str = ""
    reuse_prefix: bool = True
