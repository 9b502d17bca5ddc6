"""Declarations of dialects. Parser, renderer and grammar of a dialect come from one declaration.

A marker is written as the model writes it. Whitespace at its ends is layout: a parser accepts as much of it
as is there and requires none, a renderer writes all of it. `"<think>\\n"` matches `<think>` and `<think>\\n`,
and leaves the second newline of `<think>\\n\\n` to the text. With several spellings, the first is written.
"""

import re
from itertools import count
from secrets import token_hex
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Spellings: TypeAlias = tuple[str, ...]
QUOTES = tuple("'“‘«([{<")
ENDS = tuple(".!?:;…。！？：")
MOST_WORDS = 256
"""Maximum number of characters that a template may write after it has opened reasoning."""
TURN = re.compile(r"<[|｜/!]?\w[^\s<>]*>|\[/?[A-Z_]+\]|(?:^|\n)\s*\w+:\s*\Z")
"""Signs of a later speaker: a control token, or a line with only a speaker's name."""


class ReasoningSyntax(Struct, frozen=True, kw_only=True):
    """Markers around reasoning."""

    open: Spellings = ("<think>\n",)
    close: Spellings = ("\n</think>\n\n",)
    ended_by_call: bool = False
    """Whether a call inside reasoning ends it, unless the call is only mentioned. If False, calls in
    reasoning are reasoning.
    """
    ended_by: Spellings = ()
    """Further markers that end reasoning; they are then read again as the beginning of what follows."""
    stray_close: Literal["drop", "keep"] = "drop"
    """What to do with a closing marker when no reasoning is open."""
    preface: str = ""
    """Text at the end of the prompt that belongs to reasoning when the prompt has opened it."""
    always: bool = False
    """Whether every prompt opens reasoning. If the prompt is unknown, text without any marker is then
    reasoning.
    """


class CallSection(Struct, frozen=True, kw_only=True):
    """Markers around all calls of an answer."""

    open: Spellings
    close: Spellings
    required: bool = False
    """Whether calls outside of a section are text."""
    each: bool = False
    """Whether each call has a section of its own."""


class CallSyntax(Struct, frozen=True, kw_only=True):
    """Fields that all call syntaxes share."""

    open: Spellings = ()
    """Opening markers. If empty, a call is recognised by its first character."""
    close: Spellings = ()
    between: str = ""
    """Text written between two calls."""
    before: str = ""
    """Text written between the answer's text and the first call."""
    section: CallSection | None = None
    whole: bool = False
    """Whether the call of an undeclared tool is emitted only when it is complete, because it may be text."""
    silent: bool = False
    """Whether the markers are special tokens. One without a call is dropped and never becomes text."""
    ids: Literal["call", "mistral", "kimi"] = "call"
    """Format of generated ids when the model writes none."""

    @property
    def closing(self) -> str:
        """Text written after a call."""
        return self.close[0] if self.close else ""

    def make_id(self, name: str, written: str | None, number: int, used: set[str]) -> str:
        """Return the id that the model wrote, unless it is already used; otherwise generate one in the
        family's format.
        """
        numbers, text = count(number), written
        while not text or text in used:
            if self.ids == "kimi":
                text = f"functions.{name}:{next(numbers)}"
            else:
                text = token_hex(5)[:9] if self.ids == "mistral" else "call_" + token_hex(12)
        used.add(text)
        return text


class JsonCalls(CallSyntax, frozen=True, kw_only=True):
    """`{"name": "f", "arguments": {...}}`, alone or in a list."""

    name: Spellings = ("name",)
    arguments: Spellings = ("arguments", "parameters")
    id: Spellings = ()
    list: Literal["never", "may", "must"] = "never"
    """Whether calls are in [ ]. "may" renders without a list; "must" renders a list and also parses a single
    object.
    """
    separator: str = ", "
    """Text between the objects of a list, or of a section without one."""
    several: bool = False
    """Whether several objects, with the separator between them, may follow one marker."""
    needs_arguments: bool = False
    """Whether an object without arguments is not a call."""
    alone: bool = False
    """Whether calls of declared tools may be the whole answer, without a marker, bare
    or in a ```json fence.
    """
    declared: bool = False
    """Whether an object that does not name a declared tool is not a call."""
    indent: str = ""
    """Text written before each object of a list; each object is then on its own line."""


class NamedCalls(CallSyntax, frozen=True, kw_only=True):
    """`<open>NAME<then>{...}<close>`: the name before the arguments, which are a JSON object."""

    then: Spellings = ()
    """Text after the name. An empty string means that the object follows directly."""
    id_first: str = ""
    """Text between id and name: `<open>ID<id_first>NAME<then>`."""
    id_after: str = ""
    """Text between name and id: `<open>NAME<id_after>ID<then>`. The id is optional."""
    prefixed: str = ""
    """Prefix of Kimi's call ids, which contain the name: `functions.NAME:0`."""


class TaggedCalls(CallSyntax, frozen=True, kw_only=True):
    """`<open>NAME<then>`, then `<key>K<key_end>V<value_end>` for each argument, then `<close>`."""

    then: Spellings
    key: Spellings
    key_end: Spellings
    value_end: Spellings
    value: str = ""
    """Text between key and value, if `key_end` does not lead there directly."""
    type_end: Spellings = ()
    """End of the value's type, which is written after `key_end`."""
    types: Literal["", "string", "name"] = ""
    """Form of the written type: `string="true"`, or the name of a JSON type."""
    untyped: Literal["json", "text"] = "json"
    """How to read an argument that no schema describes: as JSON if it looks like a literal, or as text."""
    empty: Spellings = ()
    """Written instead of `then` when the call has no arguments and ends here."""
    open_end: bool = False
    """Whether the end of the answer ends a call whose last argument is complete."""
    json_body: bool = False
    """Whether a JSON object may replace the tags."""
    cdata: bool = False
    """Whether a text value may be in <![CDATA[ ]]>."""


class PythonCalls(CallSyntax, frozen=True, kw_only=True):
    """`f(a=1, b='x')`; several calls are separated and, with `brackets`, in [ ]."""

    brackets: bool = True
    separator: str = ", "


class BraceCalls(CallSyntax, frozen=True, kw_only=True):
    """Gemma's own literals: `call:f{a:<|"|>x<|"|>,n:3}`, with `quote` around strings."""

    quote: str


# Variants of the syntaxes above that one family uses.


class KeyedCalls(JsonCalls, frozen=True, kw_only=True):
    """Apertus: `{"f": {...}}`, with the name as key."""


class PythonObjects(JsonCalls, frozen=True, kw_only=True):
    """Sarashina: `{'name': 'f', 'arguments': {'a': True}}`, objects as Python literals."""


class ActionCalls(JsonCalls, frozen=True, kw_only=True):
    """Command R+: JSON calls; calls with certain names mean "no call"."""

    ignored: Spellings
    """Names that mean "no call"."""


class BlockCalls(JsonCalls, frozen=True, kw_only=True):
    """Inkling: a word may be between the opening of the section and that of the call. An object with an empty
    name is not a call.
    """


class AttributedCalls(TaggedCalls, frozen=True, kw_only=True):
    """Kimi K3: `call tool="f" index="1"`; names and keys are attributes and contain &amp; and &quot;.

    A name alone is not a call: something must follow. A call cut off after its name is dropped.
    """

    rest: str
    """Text written between the name and `then`; the parser accepts anything there. {index} counts from 1."""


class DoubledCalls(TaggedCalls, frozen=True, kw_only=True):
    """Muse: a doubled name, `f.f`, means the declared tool `f`."""


class TreeCalls(TaggedCalls, frozen=True, kw_only=True):
    """MiniMax M3: arguments are a tree of tags named after them, such as `<tags><item>a</item></tags>`."""

    lead: str
    """Text before each tag."""
    key: Spellings = ()
    key_end: Spellings = ()
    value_end: Spellings = ()


Calls: TypeAlias = JsonCalls | NamedCalls | TaggedCalls | PythonCalls | BraceCalls


class Channels(Struct, frozen=True, kw_only=True):
    """Blocks with a header that has their kind or their recipient."""

    start: Spellings
    """Text before the header of a further block. The prompt ends with it, so the first block has none."""
    header: Spellings
    """Beginnings of a header; if empty, a name begins it. Other text at the start of an answer is text."""
    body: str
    """Marker between header and body."""
    ends: Spellings = ()
    """Markers after the body. Text outside of blocks is text."""
    recipient: str = ""
    """Marker before the recipient in a header; if empty, the header is the recipient."""
    channel: str = ""
    """Marker before the channel. The channel decides the kind of a block; without channels the recipient
    does.
    """
    reasoning: frozenset[str] = frozenset()
    text: frozenset[str] = frozenset()
    call: str = ""
    """Prefix of a recipient that is a tool; the rest is the tool's name."""
    written: tuple[str, str, str] = ("", "", "")
    """Templates for reasoning, text and a call, each with {body}; the call's also has {name}."""


class Dialect(Struct, frozen=True, kw_only=True):
    """How one model family writes reasoning and tool calls."""

    name: str
    models: str
    """Models that use it, for people."""
    stems: Spellings = ()
    """Parts of its models' names, such as `qwen3-coder`; of all matching stems the longest counts."""
    reasoning: ReasoningSyntax | None = None
    calls: tuple[Calls, ...] = ()
    """Alternative call syntaxes; the renderer writes the first."""
    channels: Channels | None = None
    drops: Spellings = ()
    """Markers that are removed; the text between them stays."""
    drop_spans: tuple[tuple[str, str], ...] = ()
    """Marker pairs that are removed with the text between them."""
    text_open: str = ""
    text_close: str = ""
    """Text written before and after a non-empty text; both are in `drops`."""
    replaced: tuple[tuple[str, str], ...] = ()
    """Characters that are replaced by others before parsing."""
    prepends: str = ""
    """Text that is put before the answer."""
    unfenced: bool = False
    """Whether an answer that is a single ```json fence loses the fence."""
    response_template: Any = None
    """The ResponseTemplate from a model's files; if set, it parses the answers and the other fields are not
    used.
    """
    aliases: Spellings = ()
    """Names in other servers. If such a name covers several dialects, it means the most common one."""

    @property
    def has_calls(self) -> bool:
        return bool(self.calls) or self.channels is not None or self.response_template is not None


def starts_in_reasoning(dialect: Dialect, prompt: str, *, continues: bool = False) -> bool:
    """Whether the answer to a rendered prompt begins inside reasoning.

    The end of the prompt decides, because a marker in the middle may be quoted in a message. The end may be
    `<think>`, or `<think>` and a few words of the template, as in `<think>\\nOkay,`. If the prompt
    `continues` an answer, the last marker in it decides.
    """
    thinking = dialect.reasoning
    if thinking is None:
        return False
    opens, closes = ([spelling.strip() for spelling in group] for group in (thinking.open, thinking.close))
    if continues:
        return max(map(prompt.rfind, opens)) > max(map(prompt.rfind, closes))
    end = prompt.rstrip()[-2 * MOST_WORDS :]
    if end.endswith(tuple(opens)):
        return True
    offset, opened = max((end.rfind(spelling), spelling) for spelling in opens)
    words = end[offset + len(opened) :].lstrip()
    inside = offset >= 0 and len(words) <= MOST_WORDS and not any(close in words for close in closes)
    return inside and TURN.search(words) is None and not find_mention(end[:offset])


def prompt_opened_reasoning(dialect: Dialect, text: str) -> bool:
    """Whether the text closes reasoning before it opens any, so the prompt must have opened it.

    True for `Hm.</think>Yes.`, False for `<think>Hm.</think>Yes.`.
    """
    if dialect.reasoning is None:
        return False
    closed = _first(text, dialect.reasoning.close)
    if closed is None and not dialect.reasoning.always:
        return False
    return _first(text[:closed], dialect.reasoning.open) is None


def _first(text: str, spellings: tuple[str, ...]) -> int | None:
    offsets = [text.find(spelling.strip()) for spelling in spellings]
    return min((offset for offset in offsets if offset >= 0), default=None)


def find_mention(before: str, *, fenced: bool = False) -> Literal["", "quoted", "said"]:
    """Return whether a marker after this reasoning is only mentioned there, as in "use `<tool_call>`".

    A call that ends reasoning begins a line, or directly follows the text or the end of a sentence. In a code
    fence or quotes the model writes about calls ("quoted"); in the middle of a sentence it probably does
    ("said").
    """
    line = before.rpartition("\n")[2]
    if fenced or line.count("`") % 2 or line.count('"') % 2 or line.endswith(QUOTES):
        return "quoted"
    words = line.rstrip()
    return "said" if words and words != line and not words.endswith(ENDS) else ""
