"""What a chat template can bear, found out by rendering it with small conversations.

Rules of this file: nothing is read off a model's name; a probe that raises or loses its mark is an answer
too, but one that must be stopped is none, and the template is refused; it is done once for a template, when
it is loaded.
"""

import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeAlias

from jinja2 import nodes
from msgspec import Struct, field

from dragoman.errors import EndlessTemplate, TemplateError
from dragoman.media import MediaKind
from dragoman.types import Message, ToolCall

Render: TypeAlias = Callable[[Mapping[str, Any]], str]
Messages: TypeAlias = list[dict[str, Any]]

_MARK, _OTHER = "Qmark7", "Qother8"
_RAW = f'{{"key": "{_MARK}"}}'
_USER = {"role": "user", "content": "hi"}
_ANSWER = {"role": "assistant", "content": "yes"}
_SHORT_ID = "a1b2c3d4e"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
_REASONING = (
    ("reasoning_content", "reasoning", "thinking"),
    ("reasoning_content", "reasoning"),
    ("reasoning_content",),
    ("reasoning",),
    ("thinking",),
)


class MediaForm(Struct, frozen=True):
    """How a template is given what is to be seen, or heard, and what it writes for it (sight.py)."""

    part: Mapping[str, Any]
    roles: frozenset[str]
    """In whose messages it knows such parts."""
    run: str
    """What it writes: `<|vision_start|><|image_pad|><|vision_end|>`."""
    pattern: re.Pattern[str]
    """Of runs: some templates number them."""

    @property
    def shielded(self) -> str:
        """What clients' words must not hold: the run, up to its number."""
        numbered = self.pattern.pattern != re.escape(self.run)
        return re.split(r"\d", self.run, maxsplit=1)[0] if numbered else self.run


class TemplateTraits(Struct, frozen=True, kw_only=True):
    developer: bool
    """Knows the developer role by name."""
    system: bool
    """Writes a leading system message."""
    many_systems: bool
    """Writes every system message, wherever it stands."""
    takes_parts: frozenset[str]
    """Roles whose content may be a list of parts."""
    needs_parts: frozenset[str]
    """Roles whose content must be one."""
    raw_arguments: bool
    """Takes a call's arguments as JSON text, and writes that text unchanged."""
    null_content: bool
    """Takes null as the content of a message that only calls tools."""
    reasoning_keys: tuple[str, ...]
    """Names under which a message's reasoning can be given."""
    thinking_excludes_content: bool
    """Refuses reasoning beside content in a message that calls tools, as gpt-oss does."""
    tools: bool
    """Shows tools to the model."""
    calls: bool
    """Writes the calls of the history."""
    tool_role: bool
    """Writes the results of tools."""
    empty_tools: bool
    """No tools must be an empty list, because null cannot be gone through."""
    short_ids: bool
    """Call ids must be nine letters or digits, as Mistral's are."""
    media: Mapping[MediaKind, MediaForm] = field(default_factory=dict)
    """What it knows of pictures and sounds, for models that do."""


def detect_traits(source: str, render: Render) -> TemplateTraits:
    """`detect_traits(chatml, ChatTemplate(chatml).render).developer` is False: ChatML has no such role."""
    probe = TraitProbe(render)
    takes = frozenset(role for role in ("system", "user", "assistant", "tool") if probe.takes_parts(role))
    return TemplateTraits(
        developer=re.search(r"""["']developer["']""", source) is not None,
        system=probe.writes([{"role": "system", "content": _MARK}, _USER]),
        many_systems=probe.many_systems(),
        takes_parts=takes,
        needs_parts=frozenset(role for role in takes if not probe.takes_text(role)),
        raw_arguments=probe.raw_arguments(),
        null_content=probe.null_content(),
        reasoning_keys=probe.reasoning_keys(),
        thinking_excludes_content=probe.thinking_excludes_content(),
        tools=probe.tools(),
        calls=_MARK in (probe.any_arguments(content="") or ""),
        tool_role="tool" in takes or probe.takes_text("tool"),
        empty_tools=probe.empty_tools,
        short_ids=probe.short_ids(),
    )


class TraitProbe:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._no_tools: list[Any] | None = None
        self.empty_tools = self.text([_USER]) is None and self.text([_USER], []) is not None
        self._no_tools = [] if self.empty_tools else None

    def text(self, messages: Messages, tools: list[Any] | None = None) -> str | None:
        tools = self._no_tools if tools is None else tools
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
        try:
            return self._render(variables)
        except EndlessTemplate:
            raise
        except TemplateError:
            return None

    def tools(self) -> bool:
        """With a tool it says more than without, or it refuses the question alone."""
        text = self.text([_USER], [_TOOL])
        return text is None or _TOOL["function"]["name"] in text

    def writes(self, messages: Messages, *marks: str) -> bool:
        text = self.text(messages)
        return text is not None and all(mark in text for mark in marks or (_MARK,))

    def many_systems(self) -> bool:
        first, second = ({"role": "system", "content": mark} for mark in (_MARK, _OTHER))
        return all(
            self.writes(messages, _MARK, _OTHER)
            for messages in ([first, second, _USER], [first, _USER, _ANSWER, second, _USER])
        )

    def takes_parts(self, role: str) -> bool:
        text = self.with_content(role, [{"type": "text", "text": _MARK}])
        # A list that is written as a list is not taken apart.
        return text is not None and _MARK in text and not re.search(r"""["']type["']: ["']text["']""", text)

    def takes_text(self, role: str) -> bool:
        text = self.with_content(role, _MARK)
        return text is not None and _MARK in text

    def with_content(self, role: str, content: Any) -> str | None:
        message = {"role": role, "content": content}
        if role == "tool":
            return self.text([*_calling(), message | {"tool_call_id": _SHORT_ID, "name": "look"}], [_TOOL])
        before = [_USER] if role == "assistant" else []
        after = [] if role == "user" else [_USER]
        return self.text([*before, message, *after])

    def raw_arguments(self) -> bool:
        for content in ("", None):
            parsed = self.text(_calling(content=content), [_TOOL])
            raw = self.text(_calling(content=content, arguments=_RAW), [_TOOL])
            if parsed is not None and _MARK in parsed and "{'key'" not in parsed:
                # The template writes both alike: the model's own bytes are the better ones.
                return raw == parsed
            if raw is not None and _RAW in raw:
                return True
        return False

    def null_content(self) -> bool:
        null = self.any_arguments(content=None)
        empty = self.any_arguments(content="")
        if null is None or empty is None:
            return null is not None
        return all(null.count(word) <= empty.count(word) for word in ("None", "null"))

    def any_arguments(self, **changes: Any) -> str | None:
        parsed = self.text(_calling(**changes), [_TOOL])
        return parsed if parsed is not None else self.text(_calling(**changes, arguments=_RAW), [_TOOL])

    def reasoning_keys(self) -> tuple[str, ...]:
        def fits(keys: tuple[str, ...]) -> bool:
            text = self.any_arguments(content="", **dict.fromkeys(keys, _OTHER))
            return text is not None and text.count(_OTHER) < 2

        return next(filter(fits, _REASONING), _REASONING[0])

    def thinking_excludes_content(self) -> bool:
        thinking = dict.fromkeys(self.reasoning_keys(), _OTHER)
        both = self.any_arguments(content="so", **thinking)
        return both is None and self.any_arguments(content="", **thinking) is not None

    def short_ids(self) -> bool:
        long = self.any_arguments(content="", id="call_0123456789abcdef")
        return long is None and self.any_arguments(content="") is not None


def _calling(*, content: Any = "", arguments: Any = None, id: str = _SHORT_ID, **more: str) -> Messages:
    """A user's message, a call, its result."""
    function = {"name": "look", "arguments": {"key": _MARK} if arguments is None else arguments}
    call = {"id": id, "type": "function", "function": function}
    return [
        _USER,
        {"role": "assistant", "content": content, "tool_calls": [call], **more},
        {"role": "tool", "content": "seen", "tool_call_id": id, "name": "look"},
    ]


# What a template is tried with before only a part of a conversation is rendered with it (known.py)

SMALL = 2
"""Numbers up to this one are what templates compare places and counts with."""


def counts_messages(tree: nodes.Template) -> bool:
    """Whether a template may compare the place or the number of messages with a number of its own.

    `{% if loop.index > 20 %}` does; `{% if name | length > 20 %}` does not, where the name is no list of
    messages.
    """
    kinds = (nodes.Compare, nodes.Slice, nodes.BinExpr, nodes.Getitem)
    assigned = [(each.target, each.node) for each in tree.find_all(nodes.Assign)]
    named = [(target.name, value) for target, value in assigned if isinstance(target, nodes.Name)]
    lists = {name for name, value in named if not isinstance(value, nodes.Dict)}
    tables = {name for name, _ in named} - lists
    return any(
        _is_large(node) and not _is_length(node) and not _is_looked_up(node, tables)
        for node in tree.find_all(kinds)
    )


def _is_looked_up(node: nodes.Node, tables: Container[str]) -> bool:
    """In a table that the template itself has written: `budgets[16384]`."""
    return isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and node.node.name in tables


def _is_large(node: nodes.Node) -> bool:
    inner = (each.expr if isinstance(each, nodes.Operand) else each for each in node.iter_child_nodes())
    values = [each.value for each in inner if isinstance(each, nodes.Const)]
    return any(type(value) is int and value > SMALL for value in values)


def _is_length(node: nodes.Node) -> bool:
    """Of anything but messages."""
    if not isinstance(node, nodes.Compare):
        return False
    named = {name.name for name in node.find_all(nodes.Name)}
    return (
        isinstance(node.expr, nodes.Filter)
        and node.expr.name in ("length", "count")
        and not any("message" in name and name != "message" for name in named | {"loop"} & named)
        and "loop" not in named
    )


TRIAL_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": f"f{number}",
            "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "n"}}},
        },
    }
    for number in range(5)
)


_TRIALS = (
    # Rounds of calls in each of a user's turns, one after the other; reasoning; calls at once.
    ((14,), "", (1,)),
    ((14,), "m", (1,)),
    ((5, 0), "m", (1, 2)),
    ((1, 0, 3, 0, 0, 2), "", (2, 1, 1)),
    ((0,), "m", (1,)),
)
_TRIAL_LENGTH = 34


def trial_messages() -> Iterator[list[Message]]:
    """Conversations of a few words, of each way to hold one."""
    for rounds, mind, calls in _TRIALS:
        messages = [Message(role="system", content="s")]
        turns = itertools.cycle(rounds)
        while len(messages) < _TRIAL_LENGTH:
            messages += _trial_turn(len(messages), next(turns), mind, itertools.cycle(calls))
        yield messages


def _trial_turn(start: int, rounds: int, mind: str, calls: Iterator[int]) -> Iterator[Message]:
    yield Message(role="user", content=f"u{start}")
    for number in range(rounds):
        ids = [f"c{start:03d}{number:03d}{call:02d}" for call in range(next(calls))]
        made = tuple(ToolCall(id=id_, name=f"f{number % 3}", arguments='{"a": 1}') for id_ in ids)
        thought = f"{mind}{start}{number}" if mind else None
        said = ("", f"a{start}{number}", None)[number % 3]
        yield Message(role="assistant", content=said, reasoning=thought, tool_calls=made)
        for id_ in ids:
            yield Message(role="tool", content=f"r{id_}", tool_call_id=id_)
    yield Message(role="assistant", content=f"z{start}", reasoning=f"{mind}{start}" if mind else None)
