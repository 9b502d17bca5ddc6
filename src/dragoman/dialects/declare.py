"""How a dialect is declared. From one declaration come its parser, its renderer and its grammar.

A marker is written as the model writes it. Whitespace at its ends is layout: a reader takes as much of it as
is there and wants none, a renderer writes all of it. `"<think>\\n"` is read off `<think>` and `<think>\\n`,
and leaves the second newline of `<think>\\n\\n` to the text. Of several spellings the first is written.
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
"""Characters that a template may write after it has opened reasoning."""
TURN = re.compile(r"<[|｜/!]?\w[^\s<>]*>|\[/?[A-Z_]+\]|(?:^|\n)\s*\w+:\s*\Z")
"""What shows that others spoke since: control tokens, or on a line of its own the name of who is to speak."""


class ReasoningMarks(Struct, frozen=True, kw_only=True):
    """What stands around reasoning."""

    open: Spellings = ("<think>\n",)
    close: Spellings = ("\n</think>\n\n",)
    ended_by_call: bool = False
    """A call inside reasoning ends it, unless it is only mentioned. If not, it is reasoning in any case."""
    ended_by: Spellings = ()
    """Further markers that end it, and are read again as what follows."""
    stray_close: Literal["drop", "keep"] = "drop"
    """What becomes of a closing marker where nothing is open."""
    preface: str = ""
    """Words of the prompt that belong to reasoning when the prompt has opened it."""
    always: bool = False
    """Every prompt opens it. Where the prompt is not known, a text that has no marker at all is reasoning."""


class Section(Struct, frozen=True, kw_only=True):
    """What stands around all calls together."""

    open: Spellings
    close: Spellings
    required: bool = False
    """Calls outside of a section are text."""
    each: bool = False
    """Every call is written into a section of its own."""


class CallShape(Struct, frozen=True, kw_only=True):
    """What all ways to write a call have in common."""

    open: Spellings = ()
    """None: the call itself must be recognised, by its first character."""
    close: Spellings = ()
    between: str = ""
    """Written between two calls."""
    before: str = ""
    """Written between text and the first call."""
    section: Section | None = None
    whole: bool = False
    """Nothing is said of a call of a tool that is not declared before it is complete: it may be text."""
    silent: bool = False
    """Its markers are special tokens. One that no call goes with is dropped: it is never text."""
    ids: Literal["call", "mistral", "kimi"] = "call"
    """How ids are made up where the model writes none."""

    @property
    def closing(self) -> str:
        """What is written after a call."""
        return self.close[0] if self.close else ""

    def make_id(self, name: str, written: str | None, number: int, used: set[str]) -> str:
        """The id the model wrote, unless it has written it before; else one in the way of its family."""
        numbers, made = count(number), written
        while not made or made in used:
            if self.ids == "kimi":
                made = f"functions.{name}:{next(numbers)}"
            else:
                made = token_hex(5)[:9] if self.ids == "mistral" else "call_" + token_hex(12)
        used.add(made)
        return made


class JsonCalls(CallShape, frozen=True, kw_only=True):
    """`{"name": "f", "arguments": {...}}`, alone or in a list."""

    name: Spellings = ("name",)
    arguments: Spellings = ("arguments", "parameters")
    id: Spellings = ()
    list: Literal["never", "may", "must"] = "never"
    """Whether calls stand in [ ]. "may" writes no list; "must" writes one and also reads a single object."""
    separator: str = ", "
    """Between the objects of a list, or of a section without one."""
    several: bool = False
    """Objects may follow each other, with the separator, under one marker."""
    needs_arguments: bool = False
    """An object without arguments is no call."""
    alone: bool = False
    """Calls of declared tools may be the whole answer, without a marker, bare or in a ```json fence."""
    declared: bool = False
    """An object that does not name a declared tool is no call."""
    indent: str = ""
    """Written before each object of a list, which then stands on lines of its own."""


class NamedCalls(CallShape, frozen=True, kw_only=True):
    """`<open>NAME<then>{...}<close>`: the name outside, the arguments as a JSON object."""

    then: Spellings = ()
    """After the name. An empty one means that the object follows directly."""
    id_first: str = ""
    """`<open>ID<id_first>NAME<then>`"""
    id_after: str = ""
    """`<open>NAME<id_after>ID<then>`, where the id may be missing."""
    prefixed: str = ""
    """Kimi's names: `functions.NAME:0` is an id and holds the name; this is the prefix."""


class TaggedCalls(CallShape, frozen=True, kw_only=True):
    """`<open>NAME<then>` and then `<key>K<key_end>V<value_end>` for each argument, and `<close>`."""

    then: Spellings
    key: Spellings
    key_end: Spellings
    value_end: Spellings
    value: str = ""
    """Between the key and its value, where `key_end` does not lead there directly."""
    type_end: Spellings = ()
    """A stated type stands between `key_end` and this."""
    types: Literal["", "string", "name"] = ""
    """What the stated type says: `string="true"`, or the name of a JSON type."""
    untyped: Literal["json", "text"] = "json"
    """What an argument is that no schema speaks of: a JSON literal if it looks like one, or text."""
    empty: Spellings = ()
    """Instead of `then`: the call is complete here, and has no arguments."""
    open_end: bool = False
    """The end of the answer ends a call whose last argument is complete."""
    json_body: bool = False
    """A JSON object may stand instead of the tags."""
    cdata: bool = False
    """A text may stand in <![CDATA[ ]]>."""


class PythonCalls(CallShape, frozen=True, kw_only=True):
    """`f(a=1, b='x')`, several of them separated, in [ ] if there is a bracket."""

    brackets: bool = True
    separator: str = ", "


class BraceCalls(CallShape, frozen=True, kw_only=True):
    """Gemma's own literals: `call:f{a:<|"|>x<|"|>,n:3}`, with `quote` around strings."""

    quote: str


# What one family alone does. Each is one of the ways above, with a difference.


class KeyedCalls(JsonCalls, frozen=True, kw_only=True):
    """Apertus: `{"f": {...}}`, the name is the key."""


class PythonObjects(JsonCalls, frozen=True, kw_only=True):
    """Sarashina: `{'name': 'f', 'arguments': {'a': True}}`, objects written as Python literals."""


class ActionCalls(JsonCalls, frozen=True, kw_only=True):
    """Command R+: some calls say that there is none."""

    ignored: Spellings
    """Their names."""


class BlockCalls(JsonCalls, frozen=True, kw_only=True):
    """Inkling: a word may stand between the opening of the section and that of the call.

    An object with an empty name is no call.
    """


class AttributedCalls(TaggedCalls, frozen=True, kw_only=True):
    """Kimi K3: `call tool="f" index="1"`, where names and keys are attributes, with &amp; and &quot; in them.

    The name alone is no call: something must follow, and a call that is cut off there is dropped.
    """

    rest: str
    """Written between the name and `then`; when read, anything may stand there. {index} counts from 1."""


class DoubledCalls(TaggedCalls, frozen=True, kw_only=True):
    """Muse: a doubled name, `f.f`, is the declared tool `f`."""


class TreeCalls(TaggedCalls, frozen=True, kw_only=True):
    """MiniMax M3: arguments are a tree of tags named after them, `<tags><item>a</item></tags>`."""

    lead: str
    """Before each tag."""
    key: Spellings = ()
    key_end: Spellings = ()
    value_end: Spellings = ()


Calls: TypeAlias = JsonCalls | NamedCalls | TaggedCalls | PythonCalls | BraceCalls


class Channels(Struct, frozen=True, kw_only=True):
    """Blocks with a header that says what they are, or whom they are for."""

    start: Spellings
    """Before the header of a further block. The prompt ends with it: the first block has none."""
    header: Spellings
    """What a header begins with, else with a name. Anything else at the start of an answer is text."""
    body: str
    """Between header and body."""
    ends: Spellings = ()
    """After the body. What follows outside of a block is text."""
    recipient: str = ""
    """What precedes the recipient in a header; without it the header is the recipient."""
    channel: str = ""
    """What precedes the channel. Where there are channels they decide, else recipients do."""
    reasoning: frozenset[str] = frozenset()
    text: frozenset[str] = frozenset()
    call: str = ""
    """What a recipient must begin with to be a tool; the rest is the name."""
    written: tuple[str, str, str] = ("", "", "")
    """Reasoning, text and a call as they are written, each with {body}, a call also with {name}."""


class Dialect(Struct, frozen=True, kw_only=True):
    """How one family of models writes reasoning and tool calls."""

    name: str
    models: str
    """Who speaks it, for people."""
    stems: Spellings = ()
    """What the names of its models have in them, as `qwen3-coder`; of all that fit the longest counts."""
    reasoning: ReasoningMarks | None = None
    calls: tuple[Calls, ...] = ()
    """Alternatives; the first is the one that is written."""
    channels: Channels | None = None
    drops: Spellings = ()
    """Markers that are no text: they are removed, and what they enclose stays."""
    drop_spans: tuple[tuple[str, str], ...] = ()
    """Removed together with what is between them."""
    text_open: str = ""
    text_close: str = ""
    """Written around text where there is any; both are in `drops`."""
    replaced: tuple[tuple[str, str], ...] = ()
    """Characters that stand for others."""
    prepends: str = ""
    """Text that is put before the answer."""
    unfenced: bool = False
    """An answer that is one ```json fence is what stands in the fence."""
    own: Any = None
    """The ResponseTemplate that came with a model, and reads its answers instead of all this."""
    aliases: Spellings = ()
    """What other servers call it. A name of theirs that stands for several is that of the most common one."""

    @property
    def has_calls(self) -> bool:
        return bool(self.calls) or self.channels is not None or self.own is not None


def starts_in_reasoning(dialect: Dialect, prompt: str, *, continues: bool = False) -> bool:
    """Whether the rendered prompt leaves the answer inside of reasoning.

    What counts is the end of the prompt, not its middle, where a message may quote a marker: `<think>`, or a
    few words of the template after it, as in `<think>\\nOkay,`. Where the prompt `continues` an answer that
    was begun, it is the last marker in it.
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
    place, opened = max((end.rfind(spelling), spelling) for spelling in opens)
    words = end[place + len(opened) :].lstrip()
    inside = place >= 0 and len(words) <= MOST_WORDS and not any(close in words for close in closes)
    return inside and TURN.search(words) is None and not find_mention(end[:place])


def begins_inside(dialect: Dialect, text: str) -> bool:
    """Whether the text closes reasoning before it opens any: then the prompt had opened it.

    `Hm.</think>Yes.` begins inside, `<think>Hm.</think>Yes.` does not.
    """
    if dialect.reasoning is None:
        return False
    closed = _first(text, dialect.reasoning.close)
    if closed is None and not dialect.reasoning.always:
        return False
    return _first(text[:closed], dialect.reasoning.open) is None


def _first(text: str, spellings: tuple[str, ...]) -> int | None:
    places = [text.find(spelling.strip()) for spelling in spellings]
    return min((place for place in places if place >= 0), default=None)


def find_mention(before: str, *, fenced: bool = False) -> Literal["", "quoted", "said"]:
    """Whether a marker that follows this reasoning is only mentioned there, as in "use `<tool_call>`".

    A call that ends reasoning begins a line, or follows what was thought directly or behind the end of a
    sentence. In a code fence and in quotes somebody writes about calls, and in the middle of a sentence most
    likely too.
    """
    line = before.rpartition("\n")[2]
    if fenced or line.count("`") % 2 or line.count('"') % 2 or line.endswith(QUOTES):
        return "quoted"
    words = line.rstrip()
    return "said" if words and words != line and not words.endswith(ENDS) else ""
