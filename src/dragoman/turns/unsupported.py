"""What an engine cannot do is refused before it is asked, by the name that the client used."""

from dragoman.engines.protocol import ModelCard
from dragoman.errors import BadRequest, Part
from dragoman.turns.spec import TurnSpec
from dragoman.types import Sampling

_UNASKED = Sampling(max_tokens=0)


def refuse_unsupported(spec: TurnSpec, card: ModelCard) -> None:
    if spec.sampling.samplers is not None and not card.has_samplers:
        message = (
            "The engine behind this model has the usual samplers only (temperature, top_p, top_k, min_p and"
            " penalties), in their usual order; leave the others out."
        )
        raise BadRequest(message, param=Part("samplers"), code="unsupported_field")
    for name in card.refused:
        if _asked(spec, name):
            message = f"The engine behind this model does not support '{name}'; leave it out."
            raise BadRequest(message, param=Part(name), code="unsupported_field")


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
