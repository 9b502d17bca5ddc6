"""What a request says about LoRA adapters: by name, or by name or number with a scale."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from dragoman.errors import BadRequest
from dragoman.turns.spec import AdapterWish

Scale: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


class LoraEntry(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=512)] | None = None
    id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    scale: Scale | None = None


Lora: TypeAlias = Annotated[str, Meta(max_length=512)] | Annotated[list[LoraEntry], Meta(max_length=64)]


def wishes(lora: Lora | None) -> tuple[AdapterWish, ...] | None:
    """None: nothing was said, so the model's name decides."""
    if lora is None:
        return None
    if isinstance(lora, str):
        return (AdapterWish(lora, 1.0, "lora"),)
    return tuple(_wish(entry, f"lora[{number}]") for number, entry in enumerate(lora))


def _wish(entry: LoraEntry, place: str) -> AdapterWish:
    scale = 1.0 if entry.scale is None else entry.scale
    if entry.name is not None and entry.id is None:
        return AdapterWish(entry.name, scale, place)
    if entry.id is not None and entry.name is None:
        return AdapterWish(entry.id, scale, place)
    raise BadRequest(f"'{place}' must have a name or an id.", param=place, code="invalid_value")
