"""What a client asked, whatever API it came through."""

from hashlib import blake2b
from typing import Any, Literal, TypeAlias

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
    verbatim: bool = False
    """Text, once it has begun, is all that comes: markers in it are quotations."""
    custom: frozenset[str] = frozenset()
    """Tools that take a text: the arguments of their calls are the text itself."""
    places: tuple[str, ...] = ()
    """Where the schema of each of the tools is, for messages: `tools[2].function.parameters`."""


Syntax: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark"]


class Wanted(Struct, frozen=True, kw_only=True):
    """What the text of an answer must be."""

    syntax: Syntax
    value: Any = None
    """The schema, the pattern, the choices or the grammar."""
    param: str
    """The field that it came in."""


class Calling(Struct, frozen=True, kw_only=True):
    """What is asked about calls beyond what the model does by itself."""

    required: bool = False
    """The answer must have a call."""
    names: tuple[str, ...] | None = None
    """Only these tools may be called; None: any of them."""
    named: bool = False
    """The client has named the one tool to call, and gets one call of it."""
    param: str = "tool_choice"
    """The field that asks for it; `tools[2].function.strict` for a tool that is strict."""


class Thinking(Struct, frozen=True, kw_only=True):
    """How many tokens reasoning may have before it is ended."""

    tokens: int
    param: str
    """The field that it came in."""
    soft: bool = False
    """An engine that cannot end reasoning is asked all the same: the template has been told."""


class AdapterWish(Struct, frozen=True):
    """A LoRA adapter that is asked for."""

    adapter: str | int
    """Its name, or its number among the engine's."""
    scale: float
    place: str
    """Where it was asked for, for messages: `lora[1]`."""


class TurnSpec(Struct, frozen=True, kw_only=True):
    model: str | None
    adapters: tuple[AdapterWish, ...] | None = None
    """None: those that the model's name stands for."""
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    """`max_tokens` 0 means as many as is usual; `bad_words` and DRY's breakers come as text, below."""
    chosen: frozenset[str] = frozenset()
    """Fields of the sampling that the client has set; the others are the model's or the operator's."""
    reading: Reading | None = None
    """None: the answer is text and nothing else."""
    wanted: Wanted | None = None
    calling: Calling | None = None
    thinking: Thinking | None = None
    n: int = 1
    """Continuations to compute for each prompt."""
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    bad_words: tuple[str, ...] = ()
    dry_breakers: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    truncate_prompt: int | None = None
    """Keep this many of the prompt's last ids; -1 means as many as the model takes."""
    priority: int = 0
    cache_salt: str = ""
    reuse_prefix: bool = True
    token_ids: bool = False
    """The client wants the ids that were sampled."""
    owner: str = ""
    """Whose key it is, as a hash; empty where keys are off."""

    @property
    def salt(self) -> str:
        """Prompts share what is kept of them only where this is the same: the key and the client's own word.

        Otherwise the time that an answer takes would tell one client what another has asked.
        """
        if not self.owner:
            return self.cache_salt
        # Hashed again: it goes as far as other servers, and the hash of a key is nothing for them.
        return blake2b(f"{self.owner}\0{self.cache_salt}".encode(), digest_size=16).hexdigest()

    @property
    def constrained(self) -> bool:
        """Whether a grammar may be made for it."""
        single = self.reading is not None and self.reading.calls and self.reading.most_calls is not None
        return self.wanted is not None or self.calling is not None or single
