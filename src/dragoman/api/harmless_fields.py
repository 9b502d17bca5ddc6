"""The request fields that change nothing, and are accepted because clients send them to everybody."""

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class HarmlessFields(Struct, kw_only=True):
    """Accepted, and without effect on the answer: this is the whole published list."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    metadata: Metadata | None = None
    client_metadata: Any = None
    request_id: str | None = None
    rid: str | None = None
    prediction: Any = None
    id_slot: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    n_cache_reuse: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    spaces_between_special_tokens: bool | None = None
