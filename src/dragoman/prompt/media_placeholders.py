"""Positions of images and audio in a prompt, from the part of a message to the ids of the engine.

1. A template gets the part in the form that it knows, and writes its own text for it, its *run*:
   `<|vision_start|><|image_pad|><|vision_end|>`. Both are found by probing the template
   (`detect_media_syntax`). If it does not support such parts, or not in this role, the placeholder of the
   next step is put into the text directly.
2. In the rendered text, each run becomes a placeholder: a text of noncharacters that stands for the media. A
   client's text can contain neither: runs are broken by a mark as control tokens are (encode.py), and a
   conversation with media that contains the placeholders' noncharacter is refused. From here on, two prompts
   with different media are different texts, so code that compares texts needs nothing else (prompt_cache.py,
   token_exact.py).
3. When the text is encoded, each placeholder is filled with the engine's ids for the media
(`MediaPlaceholders`), and
   its range is recorded as a span. The run's ids before and after its middle are kept, unless the engine's
   ids contain them: some engines return everything that the model needs, others only what a processor would
   insert.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from dragoman.errors import CONVERSATION, BadRequest, TemplateError
from dragoman.media import Media, MediaKind, MediaSpan, check_modalities
from dragoman.owner_cache import OwnerCache
from dragoman.prompt.abridged import Rendering, common_prefix_length, shared_end
from dragoman.prompt.encode import IdInterner, ResumeOffsets, join_strings
from dragoman.prompt.traits import MediaSyntax, TemplateTraits, TraitProbe
from dragoman.types import Conversation, Message

PLACE = "\ufdef"
_ESCAPED_PLACE = "\\ufdef"
_ESCAPED = re.compile(r"\\ufdef(?:\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})+\\ufdef", re.IGNORECASE)
"""A placeholder as `tojson(ensure_ascii=true)` writes it."""
_SPELLED = str.maketrans({digit: chr(0x1FFFE + 0x10000 * int(digit, 16)) for digit in "0123456789abcdef"})
"""Digits of a placeholder are noncharacters, so that no text of the model and no number matches in one."""
PLAIN_RUNS: Mapping[MediaKind, str] = {"image": "<image>", "audio": "<audio>"}
"""Text shown for media where the template has none."""
MOST_PLACED = 2**20
"""Maximum number of cached ids of media."""


# How a template writes media parts


MediaForms: TypeAlias = Mapping[MediaKind, MediaSyntax]

_URL = {"url": "data:,"}
_FORMS: Mapping[MediaKind, Sequence[Mapping[str, Any]]] = {
    "image": (
        {"type": "image"},
        {"type": "image_url", "image_url": _URL},
        {"type": "image", "image": "data:,"},
    ),
    "audio": (
        {"type": "audio"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "audio_url", "audio_url": _URL},
        {"type": "audio", "audio": "data:,"},
    ),
}
_BEFORE, _BEHIND = ({"type": "text", "text": text} for text in ("Qmark7", "Qother8"))
# Without the system role: the position of its messages depends on the template, and so would the order of
# runs.
_ROLES = ("user", "tool", "assistant")
_WORDS = re.compile(r"^[\w\s:.,;#-]*")


def detect_media_syntax(
    render: Callable[[Mapping[str, Any]], str], kinds: Iterable[MediaKind]
) -> dict[MediaKind, MediaSyntax]:
    """Return the forms of the kinds that the template supports."""
    probe = TraitProbe(render)
    mapping = {kind: _find_form(probe, kind) for kind in kinds}
    return {kind: form for kind, form in mapping.items() if form is not None}


def _find_form(probe: TraitProbe, kind: MediaKind) -> MediaSyntax | None:
    for part in _FORMS[kind]:
        run = _run(_added(probe, "user", part))
        pattern = _pattern(run, _added(probe, "user", part, part)) if run else None
        if run and pattern is not None:
            roles = (role for role in _ROLES if len(pattern.findall(_added(probe, role, part))) == 1)
            return MediaSyntax(part, frozenset(roles), run, pattern)
    return None


def _added(probe: TraitProbe, role: str, *parts: Mapping[str, Any]) -> str:
    """Return what a template writes for parts between two texts; "" if it is not an addition."""
    without = probe.with_content(role, [_BEFORE, _BEHIND])
    text = probe.with_content(role, [_BEFORE, *parts, _BEHIND])
    if text is None or without is None or len(text) <= len(without):
        return ""
    start = common_prefix_length(without, text)
    size = len(text) - len(without)
    if start + shared_end(without, text) < len(without):
        return ""
    # The text after it may begin alike: then the addition began earlier.
    while start and text[start - 1] == text[start + size - 1]:
        start -= 1
    added = text[start : start + size]
    return "" if re.search(r"""["']type["']""", added) else added


def _run(added: str) -> str:
    """Strip words and spaces around a run: `Audio 1: <|AUDIO|>\\n` gives `<|AUDIO|>`."""
    start = len(added) - len(_WORDS.sub("", added, count=1))
    end = len(_WORDS.sub("", added[::-1], count=1))
    return added[start:end] if start < end else added.strip()


def _pattern(run: str, twice: str) -> re.Pattern[str] | None:
    """Return a pattern that matches a run twice in the text written for two parts."""
    same = re.escape(run)
    tried = (re.compile(each) for each in (same, re.sub(r"\d+", r"\\d+", same)))
    return next((pattern for pattern in tried if len(pattern.findall(twice)) == 2), None)


def shielded_runs(kinds: Iterable[MediaKind], traits: Iterable[TemplateTraits]) -> set[str]:
    """Return the texts that a client's words must not contain, in addition to control tokens."""
    own = {form.shielded for each in traits for form in each.media.values()}
    return own | {PLAIN_RUNS[kind] for kind in kinds}


# Placeholders in a text


def placeholder_text(media: Media) -> str:
    """Return the placeholder of a medium. Its detail counts, too, because it decides the ids."""
    key = blake2b(f"{media.digest}\0{media.detail}".encode(), digest_size=16).hexdigest()
    return PLACE + key.translate(_SPELLED) + PLACE


_PLACE_CHARS = 34


def strip_media(media: Mapping[str, Media]) -> dict[str, Media]:
    """Return the media without their data, for caches."""
    return {key: replace(each, data=b"") for key, each in media.items()}


def strip_spans(spans: Iterable[MediaSpan]) -> tuple[MediaSpan, ...]:
    return tuple(replace(span, media=replace(span.media, data=b"")) for span in spans)


def render_placeholders(
    conversation: Conversation,
    forms: MediaForms,
    modalities: frozenset[MediaKind],
    write: Callable[[Conversation], Rendering],
) -> Rendering:
    """Render a conversation with placeholders. `write` renders one without media."""
    check_modalities(conversation.media, conversation.media_params, modalities)
    _check_text(conversation)
    for supported in (forms, {}) if forms else ({},):
        shown, order = _show(conversation, supported)
        try:
            rendering = write(shown)
        except TemplateError:
            # Some templates refuse media combined with other parts.
            if supported:
                continue
            raise
        text = _mark_places(rendering.text, order, supported)
        if text is not None:
            break
    return replace(rendering, text=text)


def _check_text(conversation: Conversation) -> None:
    texts = (conversation.messages, conversation.tools, conversation.documents, conversation.response_prefix)
    joined = join_strings(msgspec.to_builtins((texts, dict(conversation.template_kwargs)), str_keys=False))
    if PLACE in joined or _ESCAPED_PLACE in joined.lower():
        message = "A conversation with images or audio cannot contain the noncharacter U+FDEF; remove it."
        raise BadRequest(message, param=CONVERSATION, code="invalid_value")


PlaceholderOrder: TypeAlias = dict[MediaKind, list[str]]
"""Placeholders for which the template is to write runs."""


def _show(conversation: Conversation, forms: MediaForms) -> tuple[Conversation, PlaceholderOrder]:
    order: PlaceholderOrder = {kind: [] for kind in forms}
    messages = tuple(_show_message(each, conversation.media, forms, order) for each in conversation.messages)
    return replace(conversation, messages=messages, media={}), order


def _show_message(
    message: Message, media: Mapping[str, Media], forms: MediaForms, order: PlaceholderOrder
) -> Message:
    if not isinstance(message.content, list) or not any("media" in part for part in message.content):
        return message
    role = "tool" if message.role == "function" else message.role
    parts = []
    for part in message.content:
        shown = media.get(part["media"]) if "media" in part else None
        form = forms.get(shown.kind) if shown else None
        if shown is None:
            parts.append(part)
        elif form is not None and role in form.roles:
            order[shown.kind].append(placeholder_text(shown))
            parts.append(dict(form.part))
        else:
            parts.append({"type": "text", "text": placeholder_text(shown)})
    return replace(message, content=parts)


def _mark_places(text: str, order: PlaceholderOrder, forms: MediaForms) -> str | None:
    """Replace runs by placeholders; return None if their numbers differ."""
    for kind, params in order.items():
        pattern = forms[kind].pattern
        if params and len(pattern.findall(text)) != len(params):
            return None
        if params:
            text = pattern.sub(partial(_next, iter(params)), text)
    if _ESCAPED_PLACE in text:
        text = _ESCAPED.sub(lambda match: str(json.loads(f'"{match.group()}"')), text)
    return text


def _next(positions: Any, _: re.Match[str]) -> str:
    param: str = next(positions)
    return param


def spell_runs(text: str, media: Iterable[Media], forms: MediaForms) -> str:
    """Replace placeholders by what the template writes, for display."""
    for item in media:
        form = forms.get(item.kind)
        text = text.replace(placeholder_text(item), form.run if form else PLAIN_RUNS[item.kind])
    return text


def chars_of_text(text: str) -> int:
    """Count the characters without placeholders, whose number of ids is unknown here."""
    return len(text) - text.count(PLACE) // 2 * _PLACE_CHARS


# Ids


Placer: TypeAlias = Callable[[Media], Sequence[int]]
"""`MediaEngine.media_token_ids`, with checked results."""


class MediaIdCache:
    """Cache of an engine's ids for media. Threads may share it."""

    def __init__(self, placer: Placer, share: IdInterner) -> None:
        self._place, self._share = placer, share
        self._kept = OwnerCache[tuple[int, ...]](MOST_PLACED)

    def find(self, media: Media, field: str) -> tuple[int, ...]:
        """Return the ids of a medium. `field` is its param in the request."""
        key = media.digest, media.detail
        ids = self._kept.get("", key)
        if ids is None:
            try:
                ids = self._share(self._place(media))
            except BadRequest as error:
                if error.param in (None, CONVERSATION):
                    error.param = field
                raise
            self._kept.put("", key, ids, len(ids))
        return ids


class MediaPlaceholders:
    """The placeholders of one prompt while it is encoded."""

    def __init__(
        self,
        conversation: Conversation,
        ids: MediaIdCache,
        runs: Mapping[MediaKind, Sequence[int]],
        controls: Container[int],
    ) -> None:
        """`runs` are the template's runs as ids; a run without a control token is ordinary text."""
        self._media = {placeholder_text(each).strip(PLACE): each for each in conversation.media.values()}
        self._fields = conversation.media_params
        self._ids = ids
        self._runs = {kind: run for kind, run in runs.items() if any(id_ in controls for id_ in run)}
        self.spans: list[MediaSpan] = []
        """Spans without data."""

    def go_on(self, spans: Iterable[MediaSpan], count: int) -> None:
        """Continue after the first ids of another prompt, which has these spans."""
        self.spans = [span for span in spans if span.start < count]

    def encode(
        self,
        encode: Callable[..., list[int]],
        at: int,
        text: str,
        *,
        begins: bool,
        borders: ResumeOffsets | None,
    ) -> list[int]:
        """Encode a text after `at` ids. `encode` is used between placeholders and appends to `borders`."""
        ids, chars = list[int](), 0
        for number, piece in enumerate(text.split(PLACE)):
            shown = self._media.get(piece) if number % 2 else None
            items, count = ResumeOffsets(), len(ids)
            if shown is not None:
                ids += self._fill(shown, at + count)
                items.append((len(piece) + 2, len(ids) - count))
            elif piece:
                ids += encode(piece, begins=begins and not ids, borders=items)
            if borders is not None:
                borders += [(chars + end, count + some) for end, some in items]
            chars += len(piece) + (2 if number % 2 else 0)
        return ids

    def _fill(self, media: Media, at: int) -> list[int]:
        own = self._ids.find(media, self._fields.get(media.key) or CONVERSATION)
        run = self._runs.get(media.kind, ())
        before = run[: run.index(own[0])] if own[0] in run else ()
        behind = run[len(run) - run[::-1].index(own[-1]) :] if own[-1] in run else ()
        self.spans.append(MediaSpan(replace(media, data=b""), at + len(before), len(own)))
        return [*before, *own, *behind]

    def settle(self, media: Mapping[str, Media]) -> tuple[MediaSpan, ...]:
        """Return the spans with their media, in the detail used when they were encoded."""
        fields = {each.digest: each for each in media.values()}
        return tuple(_settle(span, fields[span.media.digest]) for span in self.spans)


def _settle(span: MediaSpan, media: Media) -> MediaSpan:
    same = media.detail == span.media.detail
    return replace(span, media=media if same else replace(media, detail=span.media.detail))


def cut_spans(spans: Sequence[MediaSpan], whole: int, kept: int) -> tuple[tuple[MediaSpan, ...], int]:
    """Return the spans in the last ids of a prompt, and the number of ids left. A cut span is removed as a
    whole.
    """
    start = whole - kept
    for span in spans:
        if span.start < start < span.start + span.count:
            start = span.start + span.count
    left = tuple(replace(span, start=span.start - start) for span in spans if span.start >= start)
    return left, whole - start
