"""Bytes to a request struct, in one pass. Whatever is wrong becomes a 400 that names the place."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from dragoman.errors import BadRequest, UnknownField, shortened

T = TypeVar("T", bound=msgspec.Struct)

UNSUPPORTED: Mapping[str, str] = {
    name: reason
    for reason, names in {
        "say it in response_format": "response_schema",
        "whitespace and the way to a mask are the server's own": "guided_whitespace_pattern "
        "guided_decoding_backend",
        "this server has text models only": "audio mm_processor_kwargs prompt_embeds",
        "it belongs to a hosted service": "web_search_options moderation",
        "templates come from the model or the server's settings": "chat_template",
    }.items()
    for name in names.split()
}
"""Fields other servers know and we cannot honour: a 400 is better than an answer that ignores them."""

LONGEST_TEXT = 512
"""Of what msgspec says, which may quote a value or a name of any length; the place comes last."""
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `(?P<path>[^`]*)`)?")
_INVALID = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)


class Reader(msgspec.Struct, frozen=True):
    """Decodes one request type; made once per type, because building a decoder costs more than using it."""

    decoder: msgspec.json.Decoder[Any]
    names: tuple[str, ...]
    unsupported: Mapping[str, str]
    """What others know and we do not, and why."""

    @classmethod
    def of(cls, type_: type[msgspec.Struct], unsupported: Mapping[str, str] = UNSUPPORTED) -> "Reader":
        names = tuple(f.encode_name for f in msgspec.structs.fields(type_))
        return cls(msgspec.json.Decoder(type_), names, unsupported)

    def read(self, body: bytes) -> Any:
        if not body:
            raise BadRequest("The request has no body; send a JSON object.", code="empty_body")
        try:
            return self.decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(shortened(str(error), LONGEST_TEXT)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
        except RecursionError:
            raise BadRequest("The JSON of the body is nested too deeply.", code="invalid_json") from None

    def convert(self, value: Any, place: str) -> Any:
        """The same for a part of a body that was decoded before: `tools[2]`."""
        try:
            return msgspec.convert(value, self.decoder.type)
        except msgspec.ValidationError as error:
            raise self._explain(shortened(str(error), LONGEST_TEXT), place) from None
        except RecursionError:
            raise BadRequest(f"'{place}' is nested too deeply.", param=place, code="invalid_value") from None

    def _explain(self, text: str, place: str = "") -> BadRequest:
        if unknown := _UNKNOWN.match(text):
            return self._unknown(unknown["name"], _param(unknown["path"], place))
        invalid = _INVALID.match(text)
        what, path = (invalid["what"], invalid["path"]) if invalid else (text, None)
        param = _param(path, place)
        if missing := re.match(r"Object missing required field `([^`]*)`", what):
            name = f"{param}.{missing[1]}" if param else missing[1]
            return BadRequest(f"'{name}' is required.", param=name, code="missing_field")
        named = f"'{param}'" if param else "the body"
        return BadRequest(f"Invalid value for {named}: {_lower(what)}.", param=param, code="invalid_value")

    def _unknown(self, name: str, parent: str | None) -> BadRequest:
        name = shortened(name, 128)
        full = f"{parent}.{name}" if parent else name
        if parent is None and name in self.unsupported:
            message = f"'{name}' is not supported: {self.unsupported[name]}."
            return BadRequest(message, param=name, code="unsupported_field")
        near = difflib.get_close_matches(name, self.names, n=1) if parent is None else []
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return UnknownField(f"Unknown field '{full}'.{hint}", param=full)


def _param(path: str | None, place: str) -> str | None:
    """`$.messages[0].role` gives `messages[0].role`; the root gives the place, or None."""
    return (place + (path or "").removeprefix("$")).removeprefix(".") or None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].replace("`", "")
