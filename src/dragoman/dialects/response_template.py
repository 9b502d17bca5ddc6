"""The `response_template` of a `tokenizer_config.json`: a dialect declared by a model's author.

    template = ResponseTemplate.load(config)
    reader = template.reader(prompt, tools)
    events = [*reader.feed(text), *reader.finish()]

An answer is cut into regions, each for a field of the message. Text streams; a call is emitted when it is
complete. `streaming_regex.py` runs its patterns in one pass over the text, whatever the pattern. The older
`response_schema` is not supported.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from dragoman.dialects.response_reader import ResponseTemplateReader
from dragoman.dialects.response_values import CONTENTS, PLACEHOLDER, STREAMED
from dragoman.dialects.schema import ToolDeclarations
from dragoman.dialects.streaming_regex import StreamingPattern, compile_literals, compile_pattern
from dragoman.errors import SettingsError

KEY = "response_template"
VERSION = 1
MAX_FIELDS = 32
MAX_SEARCHED = 16_384
"""Maximum number of characters at the prompt's end that are searched for an anchor pattern, and read if there
is no anchor.
"""

_Shape = TypeVar("_Shape")
Kind: TypeAlias = Literal["text", "reasoning", "calls"]
KINDS: Mapping[str, Kind] = {
    "content": "text",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "calls",
}
ARGUMENTS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"strip"}),
    "int": frozenset({"strip"}),
    "float": frozenset({"strip"}),
    "bool": frozenset({"strip"}),
    "json": frozenset({"unquoted_keys", "string_delims", "allow_non_json", "strip"}),
    "xml-inline": frozenset({"tag_pattern", "value_parser", "merge_duplicates"}),
    "kv-lines": frozenset({"line_sep", "kv_sep", "value_parser", "strip"}),
}


class _Spec(Struct, forbid_unknown_fields=True):
    """A field as written in the file."""

    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class _TemplateSpec(Struct, forbid_unknown_fields=True):
    """The template as written in the file."""

    fields: dict[str, Any]
    version: int = VERSION
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None


class TemplateField(Struct, frozen=True, kw_only=True):
    """One field of the message, checked and compiled."""

    name: str
    kind: Kind
    open: StreamingPattern | None
    close: StreamingPattern | None
    content: str
    args: Mapping[str, Any]
    tags: StreamingPattern | None
    """Pattern of the tags of xml-inline."""
    join: str | None
    transform: Any
    transform_each: bool

    @property
    def streams(self) -> bool:
        return self.kind != "calls" and self.content in STREAMED and self.transform is None


class ResponseTemplate:
    """A dialect that came with its model, shared by all its parsers."""

    def __init__(self, fields: tuple[TemplateField, ...], anchor: tuple[str, ...] | StreamingPattern) -> None:
        self.fields = fields
        self.implicit = next((field for field in fields if field.open is None), None)
        """Field for text outside of all regions; if None, that text is dropped."""
        self._anchor = anchor

    @classmethod
    def load(cls, config: Mapping[str, Any]) -> "ResponseTemplate":
        """Load from a whole `tokenizer_config.json`, or from a `response_template` alone."""
        written = _convert(config.get(KEY, config), _TemplateSpec, KEY)
        if written.version != VERSION:
            raise SettingsError(f"{KEY}.version is {written.version}; only {VERSION} is supported.")
        if not 0 < len(written.fields) <= MAX_FIELDS:
            raise SettingsError(
                f"{KEY}.fields has {len(written.fields)} fields; 1 to {MAX_FIELDS} are allowed."
            )
        fields = tuple(_field(name, field) for name, field in written.fields.items())
        implicit = [field.name for field in fields if field.open is None]
        if len(implicit) > 1:
            raise SettingsError(
                f"{KEY}: {' and '.join(implicit)} have no `open`; only one field may omit it."
            )
        return cls(fields, _anchor(written))

    def reader(self, prompt: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> ResponseTemplateReader:
        """Return a parser of one answer to this prompt, whose end may already contain
        the answer's beginning.
        """
        return ResponseTemplateReader(self, self.begun(prompt), ToolDeclarations(tools))

    def begun(self, prompt: str) -> str:
        """Return the part of the answer that is in the prompt: everything after the last anchor."""
        if isinstance(self._anchor, StreamingPattern):
            end = prompt[-MAX_SEARCHED:]
            ends = [match.end for match in self._anchor.find_all(end)]
            return end[ends[-1] :] if ends else end
        offsets = [offset + len(text) for text in self._anchor if (offset := prompt.rfind(text)) >= 0]
        return prompt[max(offsets) :] if offsets else prompt[-MAX_SEARCHED:]


def _anchor(written: _TemplateSpec) -> tuple[str, ...] | StreamingPattern:
    where = f"{KEY}.start_anchor"
    if (written.start_anchor is None) == (written.start_anchor_pattern is None):
        raise SettingsError(f"{KEY} needs exactly one of start_anchor and start_anchor_pattern.")
    if written.start_anchor is not None:
        return _literals(written.start_anchor, where)
    return compile_pattern(written.start_anchor_pattern or "", f"{where}_pattern")


def _literals(written: str | list[str], where: str) -> tuple[str, ...]:
    texts = (written,) if isinstance(written, str) else tuple(written)
    if not texts or not all(texts):
        raise SettingsError(f"{where} must be a non-empty text or a list of such texts.")
    return texts


def _convert(written: Any, kind: type[_Shape], where: str) -> _Shape:
    try:
        return msgspec.convert(written, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise SettingsError(f"{where}{path.rstrip('`')}: {what}.") from error


def _field(name: str, written: Any) -> TemplateField:
    where = f"{KEY}.fields.{name}"
    spec = _convert(written, _Spec, where)
    if name not in KINDS:
        raise SettingsError(f"{where}: not a field of an answer; use one of {', '.join(KINDS)}.")
    opener = _marker(spec.open, spec.open_pattern, f"{where}.open")
    closer = _marker(spec.close, spec.close_pattern, f"{where}.close")
    _check_transform(spec, [opener, closer], where)
    if spec.join is not None and not spec.repeats:
        raise SettingsError(f"{where}.join requires `repeats`.")
    return TemplateField(
        name=name,
        kind=KINDS[name],
        open=opener,
        close=closer,
        content=spec.content,
        args=spec.content_args,
        tags=_check_content(spec.content, spec.content_args, where),
        join=spec.join,
        transform=spec.transform,
        transform_each=spec.transform_each,
    )


def _marker(literal: str | list[str] | None, pattern: str | None, where: str) -> StreamingPattern | None:
    if literal is not None and pattern is not None:
        raise SettingsError(f"{where} and {where}_pattern are both set; set one of them.")
    if literal is not None:
        return compile_literals(_literals(literal, where), where)
    if pattern is None:
        return None
    compiled = compile_pattern(pattern, f"{where}_pattern")
    if compiled.matches_nothing:
        raise SettingsError(
            f"{where}_pattern matches the empty text everywhere; make it match at least one character."
        )
    return compiled


def _check_content(content: str, args: Mapping[str, Any], where: str) -> StreamingPattern | None:
    """Check a content type and its arguments; return the tag pattern of xml-inline."""
    if content not in CONTENTS:
        raise SettingsError(
            f"{where}.content: {content!r} is unknown; use one of {', '.join(sorted(CONTENTS))}."
        )
    if unknown := set(args) - ARGUMENTS[content]:
        raise SettingsError(f"{where}.content_args: {content} does not accept {', '.join(sorted(unknown))}.")
    delimiters = args.get("string_delims", [])
    if not all(isinstance(pair, list) and len(pair) == 2 and all(pair) for pair in delimiters):
        raise SettingsError(f"{where}.content_args.string_delims must be a list of pairs of texts.")
    inner, param = args.get("value_parser") or {}, f"{where}.value_parser"
    if _check_content(inner.get("name", "text"), inner.get("args", {}), param) if inner else None:
        raise SettingsError(f"{param}: nested tags are not supported; use another parser.")
    if content != "xml-inline":
        return None
    param = f"{where}.content_args.tag_pattern"
    tags = compile_pattern(str(args.get("tag_pattern", "")), param)
    if not {"key", "value"} <= set(tags.groups):
        raise SettingsError(f"{param} must have the groups `key` and `value`.")
    return tags


def _check_transform(spec: _Spec, markers: list[StreamingPattern | None], where: str) -> None:
    groups = [name for marker in markers if marker for name in marker.groups]
    if spec.transform is None and groups:
        raise SettingsError(f"{where}: the group {groups[0]!r} requires a `transform`.")
    if spec.transform is None and spec.transform_each:
        raise SettingsError(f"{where}.transform_each requires `transform`.")
    todo = [spec.transform]
    while todo:
        part = todo.pop()
        if isinstance(part, dict | list):
            todo += part.values() if isinstance(part, dict) else part
        elif isinstance(part, str) and PLACEHOLDER.search(part) and not PLACEHOLDER.fullmatch(part):
            raise SettingsError(
                f"{where}.transform: {part!r} has other text around a placeholder; remove it."
            )
