"""What a client asked, whatever API it came through."""

from msgspec import Struct

from dragoman.types import Prompt, Sampling


class TurnSpec(Struct, frozen=True, kw_only=True):
    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    """`max_tokens` 0 means as many as the context holds; `bad_words` come as text, below."""
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
