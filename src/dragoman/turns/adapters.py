"""Which LoRA adapters a request is answered with."""

from collections.abc import Sequence

from dragoman.engines.protocol import ModelCard
from dragoman.errors import ADAPTERS, BadRequest
from dragoman.turns.spec import AdapterWish
from dragoman.types import Adapters


def chosen_adapters(card: ModelCard, named: str | None, wishes: Sequence[AdapterWish] | None) -> Adapters:
    """`named` is the adapter that the model's name stands for; what has a scale of 0 is not there."""
    if wishes is None:
        return ((named, 1.0),) if named is not None else ()
    if named is not None:
        message = f"'{named}' is an adapter already; leave out '{ADAPTERS}', or send the model's own name."
        raise BadRequest(message, param=ADAPTERS, code="invalid_value")
    scales: dict[str, float] = {}
    for wish in wishes:
        name = _known(card, wish)
        if name in scales:
            message = f"The adapter '{name}' is there a second time; name it once."
            raise BadRequest(message, param=wish.place, code="invalid_value")
        scales[name] = wish.scale
    chosen = {name: scale for name, scale in scales.items() if scale}
    if not card.mixes_adapters:
        _check_single(chosen, wishes)
    return tuple(sorted(chosen.items()))


def _known(card: ModelCard, wish: AdapterWish) -> str:
    if isinstance(wish.adapter, int):
        if wish.adapter < len(card.adapters):
            return card.adapters[wish.adapter]
    elif wish.adapter in card.adapters:
        return wish.adapter
    known = ", ".join(f"{name} ({number})" for number, name in enumerate(card.adapters)) or "none"
    message = f"There is no adapter {wish.adapter!r}; there are: {known}."
    raise BadRequest(message, param=wish.place, code="invalid_value")


def _check_single(chosen: dict[str, float], wishes: Sequence[AdapterWish]) -> None:
    if len(chosen) > 1:
        message = "The engine behind this model uses one adapter at a time; name one."
        raise BadRequest(message, param=ADAPTERS, code="unsupported_field")
    for wish in wishes:
        if wish.scale not in (0.0, 1.0):
            message = "The engine behind this model has no scales of adapters; leave out the scale."
            raise BadRequest(message, param=f"{wish.place}.scale", code="unsupported_field")
