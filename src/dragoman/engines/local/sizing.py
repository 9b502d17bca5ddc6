"""How many slots of how many tokens: what the model was trained for, as far as memory goes."""

from msgspec import Struct

from dragoman.engines.local import machine
from dragoman.engines.local.model import Model
from dragoman.engines.local.options import LocalOptions
from dragoman.errors import SettingsError

# Memory for keys and values is taken and touched at once, so a small model must not grab it all.
MOST = 2 << 30
_SLOTS = (32, 16, 8, 4, 2, 1)
# Conversations with tools need room; below this, fewer slots are better than shorter ones.
_ROOM = 2048
# Who is alone needs few, for what his tools ask beside him, and long ones.
_OWN_SLOTS, _OWN_ROOM = 4, 8192
_GRAIN = 256


class Size(Struct, frozen=True):
    slots: int
    context: int
    threads: int


def size_for(model: Model, options: LocalOptions) -> Size:
    tokens = memory_for(options.kv_memory) // max(1, model.token_bytes)
    most, room = full_slots(options), _ROOM if expected(options) > 1 else _OWN_ROOM
    slots, context = divide(tokens, model.trained_context, options.slots, options.context, most, room)
    half = 2 if options.kv_cache == "int8" else 1
    check_memory(slots * context * model.token_bytes // half, f"{slots} slots of {context} tokens")
    return Size(slots, context, options.threads or machine.cores())


def pages_for(page: int, page_bytes: int, trained: int, options: LocalOptions) -> tuple[int, int, int]:
    """Slots, context and pages, where slots share the memory: one may take what the others leave."""
    pages = max(1, memory_for(options.kv_memory) // page_bytes)
    context = options.context or max(page, min(trained, pages * page))
    slots, full = options.slots or _SLOTS[0], full_slots(options)
    each = -(-context // page)
    check_memory(each * page_bytes, f"A context of {context} tokens")
    return slots, context, max(each, min(pages, full * each))


def check_context(asked: int | None, trained: int) -> None:
    """A model that never saw a position writes nonsense there."""
    if asked is not None and 0 < trained < asked:
        message = (
            f"`context` is {asked}, but this model was made for {trained} tokens; set {trained} or less."
        )
        raise SettingsError(message, param="context")


def check_memory(needed: int, what: str) -> None:
    """What is not there would only be missed later, when the system ends the process for it."""
    free = machine.free_memory()
    if needed > free:
        raise SettingsError(
            f"{what} would take {needed / (1 << 30):.1f} GiB for keys and values, and {free / (1 << 30):.1f}"
            " are free; set fewer `slots`, a shorter `context`, or `kv_cache` to int8.",
            param="context",
        )


def memory_for(asked: int | None) -> int:
    """Bytes for keys and values: as many as were asked for, or a share of what is free."""
    return asked or min(machine.free_memory() // 4, MOST)


def expected(options: LocalOptions) -> int:
    """How many read at once: as was said, or as many as there are to be slots, or one."""
    return options.readers or options.slots or 1


def full_slots(options: LocalOptions) -> int:
    """Slots that there is memory for when all are full, if there is as much."""
    return options.slots or (_SLOTS[0] if expected(options) > 1 else _OWN_SLOTS)


def divide(
    tokens: int,
    trained: int,
    slots: int | None,
    context: int | None,
    most: int = _SLOTS[0],
    room: int = _ROOM,
) -> tuple[int, int]:
    """Share out `tokens` of memory: `divide(90_000, 8192, None, None)` is 32 slots of 2560."""
    wanted = context or min(trained, room)
    if slots is None:
        slots = next((count for count in _SLOTS if count <= most and count * wanted <= tokens), 1)
    if context is None:
        context = max(_GRAIN, min(trained, tokens // slots // _GRAIN * _GRAIN))
    return slots, context
