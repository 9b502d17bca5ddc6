"""Where pictures and sounds stand in a prompt, from the part of a message to the ids of the engine.

1. A template is given the part in the form that it knows, and writes its own words for it, its *run*:
   `<|vision_start|><|image_pad|><|vision_end|>`. Both are found by trying the template (`find_forms`). Where
   it knows no such parts, or not in this role, what the next step makes is put into the text at once.
2. In what was rendered, each run becomes a *place*: a text of noncharacters that stands for what is shown.
   Clients' words can hold neither: runs are broken by a mark in them as control tokens are (encode.py), and
   a conversation with pictures that holds the noncharacter of places is refused. From here on two prompts
   that show other things are other texts; who goes on from a text needs to know no more (known.py, seams.py).
3. When the text is encoded, each place is filled with the ids that the engine wants there (`Filling`), and
   it is noted as a span where these stand. What the run has before and behind its middle is kept, unless the
   engine's ids have it: some engines give all that the model wants, others what a processor would put there.
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
from dragoman.lately import Lately
from dragoman.media import Media, MediaKind, MediaSpan, check_modalities
from dragoman.prompt.encode import Borders, SharedIds, join_strings
from dragoman.prompt.short import Rendering, shared_end, shared_start
from dragoman.prompt.traits import MediaForm, TemplateTraits, TraitProbe
from dragoman.types import Conversation, Message

PLACE = "\ufdef"
_ESCAPED_PLACE = "\\ufdef"
_ESCAPED = re.compile(r"\\ufdef(?:\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})+\\ufdef", re.IGNORECASE)
"""As `tojson(ensure_ascii=true)` writes one."""
_SPELLED = str.maketrans({digit: chr(0x1FFFE + 0x10000 * int(digit, 16)) for digit in "0123456789abcdef"})
"""Digits of a place are noncharacters, so that nothing that a model says is found in one, and no number."""
PLAIN_RUNS: Mapping[MediaKind, str] = {"image": "<image>", "audio": "<audio>"}
"""What prompts of text say where the template says nothing."""
MOST_PLACED = 2**20
"""Ids of pictures that are kept."""


# What a template makes of parts


MediaForms: TypeAlias = Mapping[MediaKind, MediaForm]

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
# Not the system's: where its messages go depends on the template, and so would the order of runs.
_ROLES = ("user", "tool", "assistant")
_WORDS = re.compile(r"^[\w\s:.,;#-]*")


def find_forms(
    render: Callable[[Mapping[str, Any]], str], kinds: Iterable[MediaKind]
) -> dict[MediaKind, MediaForm]:
    """Of those kinds that the template knows."""
    probe = TraitProbe(render)
    found = {kind: _find_form(probe, kind) for kind in kinds}
    return {kind: form for kind, form in found.items() if form is not None}


def _find_form(probe: TraitProbe, kind: MediaKind) -> MediaForm | None:
    for part in _FORMS[kind]:
        run = _run(_added(probe, "user", part))
        pattern = _pattern(run, _added(probe, "user", part, part)) if run else None
        if run and pattern is not None:
            roles = (role for role in _ROLES if len(pattern.findall(_added(probe, role, part))) == 1)
            return MediaForm(part, frozenset(roles), run, pattern)
    return None


def _added(probe: TraitProbe, role: str, *parts: Mapping[str, Any]) -> str:
    """What a template writes for parts between two texts; empty where it is not an addition."""
    without = probe.with_content(role, [_BEFORE, _BEHIND])
    text = probe.with_content(role, [_BEFORE, *parts, _BEHIND])
    if text is None or without is None or len(text) <= len(without):
        return ""
    start = shared_start(without, text)
    size = len(text) - len(without)
    if start + shared_end(without, text) < len(without):
        return ""
    # What follows may begin like it: then it began earlier.
    while start and text[start - 1] == text[start + size - 1]:
        start -= 1
    added = text[start : start + size]
    return "" if re.search(r"""["']type["']""", added) else added


def _run(added: str) -> str:
    """Without words and spaces around it: `Audio 1: <|AUDIO|>\\n` has `<|AUDIO|>`."""
    start = len(added) - len(_WORDS.sub("", added, count=1))
    end = len(_WORDS.sub("", added[::-1], count=1))
    return added[start:end] if start < end else added.strip()


def _pattern(run: str, twice: str) -> re.Pattern[str] | None:
    """Of what stands twice in what is written for two."""
    same = re.escape(run)
    tried = (re.compile(each) for each in (same, re.sub(r"\d+", r"\\d+", same)))
    return next((pattern for pattern in tried if len(pattern.findall(twice)) == 2), None)


def shielded_runs(kinds: Iterable[MediaKind], traits: Iterable[TemplateTraits]) -> set[str]:
    """What clients' words must not hold beside control tokens."""
    own = {form.shielded for each in traits for form in each.media.values()}
    return own | {PLAIN_RUNS[kind] for kind in kinds}


# Places in a text


def spell_place(media: Media) -> str:
    """The text that stands for it. How closely it is to be looked at counts, too: it decides over ids."""
    key = blake2b(f"{media.digest}\0{media.detail}".encode(), digest_size=16).hexdigest()
    return PLACE + key.translate(_SPELLED) + PLACE


_PLACE_CHARS = 34


def strip_media(media: Mapping[str, Media]) -> dict[str, Media]:
    """What is to be remembered of them: all but their data."""
    return {key: replace(each, data=b"") for key, each in media.items()}


def strip_spans(spans: Iterable[MediaSpan]) -> tuple[MediaSpan, ...]:
    return tuple(replace(span, media=replace(span.media, data=b"")) for span in spans)


def render_places(
    conversation: Conversation,
    forms: MediaForms,
    modalities: frozenset[MediaKind],
    write: Callable[[Conversation], Rendering],
) -> Rendering:
    """What a template writes for a conversation, with places. `write` renders one without media."""
    check_modalities(conversation.media, conversation.places, modalities)
    _check_text(conversation)
    for given in (forms, {}) if forms else ({},):
        shown, order = _show(conversation, given)
        try:
            made = write(shown)
        except TemplateError:
            # Some refuse pictures beside something else.
            if given:
                continue
            raise
        text = _mark_places(made.text, order, given)
        if text is not None:
            break
    return replace(made, text=text)


def _check_text(conversation: Conversation) -> None:
    said = (conversation.messages, conversation.tools, conversation.documents, conversation.response_prefix)
    joined = join_strings(msgspec.to_builtins((said, dict(conversation.template_kwargs)), str_keys=False))
    if PLACE in joined or _ESCAPED_PLACE in joined.lower():
        message = "A conversation with images or audio cannot contain the noncharacter U+FDEF."
        raise BadRequest(message, param=CONVERSATION, code="invalid_value")


Order: TypeAlias = dict[MediaKind, list[str]]
"""The places that the template is to write runs for."""


def _show(conversation: Conversation, forms: MediaForms) -> tuple[Conversation, Order]:
    order: Order = {kind: [] for kind in forms}
    messages = tuple(_show_message(each, conversation.media, forms, order) for each in conversation.messages)
    return replace(conversation, messages=messages, media={}), order


def _show_message(message: Message, media: Mapping[str, Media], forms: MediaForms, order: Order) -> Message:
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
            order[shown.kind].append(spell_place(shown))
            parts.append(dict(form.part))
        else:
            parts.append({"type": "text", "text": spell_place(shown)})
    return replace(message, content=parts)


def _mark_places(text: str, order: Order, forms: MediaForms) -> str | None:
    """With places for runs; None where there are more or fewer of these."""
    for kind, places in order.items():
        pattern = forms[kind].pattern
        if places and len(pattern.findall(text)) != len(places):
            return None
        if places:
            text = pattern.sub(partial(_next, iter(places)), text)
    if _ESCAPED_PLACE in text:
        text = _ESCAPED.sub(lambda found: str(json.loads(f'"{found.group()}"')), text)
    return text


def _next(places: Any, _: re.Match[str]) -> str:
    place: str = next(places)
    return place


def spell_runs(text: str, media: Iterable[Media], forms: MediaForms) -> str:
    """A text with what the template writes in the place of places, for those who read it."""
    for each in media:
        form = forms.get(each.kind)
        text = text.replace(spell_place(each), form.run if form else PLAIN_RUNS[each.kind])
    return text


def chars_of_text(text: str) -> int:
    """Without places, of which nobody knows here how many ids they have."""
    return len(text) - text.count(PLACE) // 2 * _PLACE_CHARS


# Ids


Placer: TypeAlias = Callable[[Media], Sequence[int]]
"""`MediaEngine.place`; what it gives was checked."""


class MediaIds:
    """What an engine wants in the places of pictures, asked once. Threads may share it."""

    def __init__(self, place: Placer, share: SharedIds) -> None:
        self._place, self._share = place, share
        self._kept = Lately[tuple[int, ...]](MOST_PLACED)

    def find(self, media: Media, field: str) -> tuple[int, ...]:
        """`field` is where the request has it."""
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


class Filling:
    """The places of one prompt, while it is encoded."""

    def __init__(
        self,
        conversation: Conversation,
        ids: MediaIds,
        runs: Mapping[MediaKind, Sequence[int]],
        controls: Container[int],
    ) -> None:
        """`runs` are those of the template, as ids; those without a control token are mere words."""
        self._media = {spell_place(each).strip(PLACE): each for each in conversation.media.values()}
        self._fields = conversation.places
        self._ids = ids
        self._runs = {kind: run for kind, run in runs.items() if any(id_ in controls for id_ in run)}
        self.spans: list[MediaSpan] = []
        """Without data."""

    def go_on(self, spans: Iterable[MediaSpan], count: int) -> None:
        """From the first ids of another prompt, which has these."""
        self.spans = [span for span in spans if span.start < count]

    def encode(
        self, encode: Callable[..., list[int]], at: int, text: str, *, begins: bool, borders: Borders | None
    ) -> list[int]:
        """A text behind so many ids. `encode` is for what stands between places, and `borders` as there."""
        ids, chars = list[int](), 0
        for number, piece in enumerate(text.split(PLACE)):
            shown = self._media.get(piece) if number % 2 else None
            found, count = Borders(), len(ids)
            if shown is not None:
                ids += self._fill(shown, at + count)
                found.append((len(piece) + 2, len(ids) - count))
            elif piece:
                ids += encode(piece, begins=begins and not ids, borders=found)
            if borders is not None:
                borders += [(chars + end, count + some) for end, some in found]
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
        """The spans with what is shown there, as closely as it was to be looked at when it was placed."""
        found = {each.digest: each for each in media.values()}
        return tuple(_settle(span, found[span.media.digest]) for span in self.spans)


def _settle(span: MediaSpan, media: Media) -> MediaSpan:
    same = media.detail == span.media.detail
    return replace(span, media=media if same else replace(media, detail=span.media.detail))


def cut_spans(spans: Sequence[MediaSpan], whole: int, kept: int) -> tuple[tuple[MediaSpan, ...], int]:
    """Of a prompt's last ids: the spans in these, and how many ids are left. What is cut goes as a whole."""
    start = whole - kept
    for span in spans:
        if span.start < start < span.start + span.count:
            start = span.start + span.count
    left = tuple(replace(span, start=span.start - start) for span in spans if span.start >= start)
    return left, whole - start
