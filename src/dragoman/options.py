"""Settings as flags and environment variables, derived from the types of a struct."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

ENV_PREFIX = "DRAGOMAN_"


class Option(Struct, frozen=True):
    """One setting as a flag and as an environment variable."""

    name: str
    """`port`, or `limit_messages` for a field of Limits."""
    path: tuple[str, ...]
    help: str
    default: Any
    is_bool: bool
    is_list: bool
    is_object: bool
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


def options_of(struct: type[Struct], path: tuple[str, ...], prefix: str) -> Iterator[Option]:
    hints = get_type_hints(struct, include_extras=True)
    for spec in msgspec.structs.fields(struct):
        if spec.name == "limits":
            continue
        plain, description = _unwrap(hints[spec.name])
        default = spec.default_factory() if callable(spec.default_factory) else spec.default
        yield Option(
            name=prefix + spec.name,
            path=(*path, spec.name),
            help=description,
            default=default,
            is_bool=plain is bool,
            is_list=get_origin(plain) is list,
            is_object=get_origin(plain) is dict,
            choices=get_args(plain) if get_origin(plain) is Literal else (),
        )


def _unwrap(hint: Any) -> tuple[Any, str]:
    """Unwrap a type: `Annotated[int | None, Meta(description="x")]` gives `(int, "x")`."""
    if get_origin(hint) in (types.UnionType, Union):
        return _unwrap(next(arg for arg in get_args(hint) if arg is not type(None)))
    if get_origin(hint) is not Annotated:
        return hint, ""
    inner, *extras = get_args(hint)
    plain, inner_description = _unwrap(inner)
    described = (extra.description for extra in extras if isinstance(extra, Meta) and extra.description)
    return plain, next(described, inner_description)
