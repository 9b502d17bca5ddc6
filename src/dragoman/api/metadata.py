"""The pairs that a client attaches to what is stored, and changes later."""

from msgspec import Struct

from dragoman.api.fields.harmless import Metadata
from dragoman.api.read import Reader


class ChangeMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    """The only thing that can be changed. What was there before is gone; null leaves none."""

    metadata: Metadata | None


_READER = Reader.of(ChangeMetadata)


def read(body: bytes) -> dict[str, str]:
    request: ChangeMetadata = _READER.read(body)
    return request.metadata or {}
