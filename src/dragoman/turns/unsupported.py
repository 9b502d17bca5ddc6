"""What an engine cannot do is refused before it is asked, by the name that the client used."""

from collections.abc import Collection

from dragoman.errors import BadRequest
from dragoman.turns.spec import TurnSpec
from dragoman.types import Sampling

_UNASKED = Sampling(max_tokens=0)
_PUBLIC = {"reuse_prefix": "cache_prompt"}
"""Names of fields that clients know by another one."""


def refuse_unsupported(spec: TurnSpec, unsupported: Collection[str]) -> None:
    """`unsupported` is what the engine's card says."""
    for name in unsupported:
        if _asked(spec, name):
            public = _PUBLIC.get(name, name)
            message = f"The engine behind this model does not support {public}; leave it out."
            raise BadRequest(message, param=public, code="unsupported_field")


def _asked(spec: TurnSpec, name: str) -> bool:
    match name:
        case "bad_words":
            return bool(spec.bad_words)
        case "priority":
            return spec.priority != 0
        case "cache_salt":
            return spec.cache_salt != ""
        case "reuse_prefix":
            return not spec.reuse_prefix
        case "return_token_ids":
            return spec.token_ids
    return bool(getattr(spec.sampling, name) != getattr(_UNASKED, name))
