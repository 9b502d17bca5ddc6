"""Weights that change while they serve: the requests to pause and to go on, and what replies say of them."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from dragoman.api.read import Reader


class PauseRequest(Struct, forbid_unknown_fields=True):
    pass


class ResumeRequest(Struct, forbid_unknown_fields=True):
    weight_version: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


_pause = Reader.of(PauseRequest)
_resume = Reader.of(ResumeRequest)


def read_pause(body: bytes) -> None:
    """There is nothing to say, so nothing need be sent."""
    _pause.read(body or b"{}")


def read_resume(body: bytes) -> ResumeRequest:
    request: ResumeRequest = _resume.read(body or b"{}")
    return request


def state(*, paused: bool, version: str | None) -> dict[str, Any]:
    return {"object": "engine", "status": "paused" if paused else "running", "weight_version": version}


def weight_field(version: str | None) -> dict[str, str]:
    """A part of every answer, where the engine has something to say."""
    return {} if version is None else {"weight_version": version}
