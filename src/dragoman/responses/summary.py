"""Steps that make a conversation short, or only say how long it is."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from dragoman.api.responses.compaction import PREFIX, Compacted, compacted, for_summary, to_summarise
from dragoman.api.responses.request import ResponseRequest, spec
from dragoman.api.responses.tools import Offer, offer_tools
from dragoman.responses.context import Context, fit_items, new_id
from dragoman.turns.model import ServedModel
from dragoman.turns.turn import Turn
from dragoman.types import Usage


def count_tokens(
    model: ServedModel,
    request: ResponseRequest,
    context: Context,
    items: Sequence[dict[str, Any]],
    offer: Offer,
) -> int:
    """Of the prompt that these items make."""
    asked = spec(request, items, offer, first=True, unseal=context.unseal)
    return len(model.prompter.render(asked.prompts[0])[1])


async def summarise(
    model: ServedModel, request: ResponseRequest, context: Context, items: Sequence[dict[str, Any]]
) -> tuple[Compacted, Usage]:
    """What the model makes of the items; the oldest are left out where it cannot read them all."""
    plain, nothing = for_summary(request), offer_tools(None, model.limits)

    async def planned(some: Sequence[dict[str, Any]]) -> Turn:
        asking = to_summarise(some, new_id("msg_"))
        telling = partial(spec, plain, asking, nothing, first=True, unseal=context.unseal)
        asked = await context.aside(context.size, telling)
        most = max(model.card.max_model_len // 4, 1)
        asked = replace(asked, sampling=replace(asked.sampling, max_tokens=most))
        return await model.turn(asked, context.owner, context.size)

    async with await fit_items(items, planned) as turn:
        (answer,) = await turn.answers()
    text = answer.text.strip() or answer.reasoning.strip()
    return compacted(items, context.seal(text), new_id(PREFIX)), turn.usage
