"""The request fields that change nothing, and are accepted because clients send them to everybody."""

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

Told: TypeAlias = Annotated[str, Meta(max_length=1024)]
"""Some of them are in the reply."""


class HarmlessFields(Struct, kw_only=True):
    """Accepted, and without effect on the answer: this is the whole published list."""

    user: Told | None = None
    safety_identifier: Told | None = None
    prompt_cache_key: Told | None = None
    prompt_cache_retention: Told | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: Told | None = None
    metadata: Metadata | None = None
    client_metadata: Any = None
    request_id: Told | None = None
    rid: Told | None = None
    prediction: Any = None
    id_slot: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    n_cache_reuse: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    spaces_between_special_tokens: bool | None = None
