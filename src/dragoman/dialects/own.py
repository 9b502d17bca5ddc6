"""The dialect that came with a model: the `response_template` of its `tokenizer_config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dragoman.dialects.declare import Dialect
from dragoman.dialects.registry import get
from dragoman.dialects.response_template import ResponseTemplate
from dragoman.errors import SettingsError


def own_dialect(config: Mapping[str, Any]) -> Dialect:
    """From the whole configuration, or from its `response_template` alone."""
    return Dialect(
        name="response_template",
        models="one model, by its own declaration",
        own=ResponseTemplate.load(config),
    )


def dialect_of(name: str) -> Dialect:
    """A dialect by name, or the one that a file declares: for those who may name files of this machine."""
    if not name.endswith(".json"):
        return get(name)
    try:
        config = msgspec.json.decode(Path(name).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"The dialect {name!r} cannot be read as a file of JSON.") from error
    if not isinstance(config, dict) or "response_template" not in config:
        raise SettingsError(f"{name!r} has no response_template; name the dialect instead.")
    return own_dialect(config)
