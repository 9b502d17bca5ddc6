"""Features that a chat template supports, detected by rendering it with small conversations.

Rules of this file: a model's name is never used; a probe that raises or loses its mark is a result, too, but
if one must be stopped, the template is refused; detection runs once per template, when it is loaded.
"""

import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeAlias

from jinja2 import nodes
from msgspec import Struct, field

from dragoman.errors import TemplateBudgetExceeded, TemplateError
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


class MediaSyntax(Struct, frozen=True):
    """How a template takes media parts, and what it writes for them (media_placeholders.py)."""

    part: Mapping[str, Any]
    roles: frozenset[str]
    """Roles whose messages may have such parts."""
    run: str
    """What it writes, such as `<|vision_start|><|image_pad|><|vision_end|>`."""
    pattern: re.Pattern[str]
    """Pattern of runs: some templates number them."""

    @property
    def shielded(self) -> str:
        """Text that a client's words must not contain: the run, up to its number."""
        numbered = self.pattern.pattern != re.escape(self.run)
        return re.split(r"\d", self.run, maxsplit=1)[0] if numbered else self.run


class TemplateTraits(Struct, frozen=True, kw_only=True):
    developer: bool
    """Whether it knows the developer role."""
    system: bool
    """Whether it writes a leading system message."""
    many_systems: bool
    """Whether it writes every system message at any position."""
    takes_parts: frozenset[str]
    """Roles whose content may be a list of parts."""
    needs_parts: frozenset[str]
    """Roles whose content must be a list of parts."""
    raw_arguments: bool
    """Whether it takes a call's arguments as JSON text and writes it unchanged."""
    null_content: bool
    """Whether it takes null as the content of a message that only calls tools."""
    reasoning_keys: tuple[str, ...]
    """Keys for a message's reasoning."""
    thinking_excludes_content: bool
    """Whether it refuses reasoning together with content in a message that calls tools, as gpt-oss does."""
    tools: bool
    """Whether it shows tools to the model."""
    calls: bool
    """Whether it writes calls in the history."""
    tool_role: bool
    """Whether it writes tool results."""
    empty_tools: bool
    """Whether no tools must be an empty list, because it iterates over null."""
    short_ids: bool
    """Whether call ids must be nine letters or digits, as in Mistral's."""
    media: Mapping[MediaKind, MediaSyntax] = field(default_factory=dict)
    """Syntax of image and audio parts, for models that take them."""


def detect_traits(source: str, render: Render) -> TemplateTraits:
    """Detect traits: `detect_traits(chatml, ChatTemplate(chatml).render).developer` is False, as ChatML has
    no such role.
    """
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
        except TemplateBudgetExceeded:
            raise
        except TemplateError:
            return None

    def tools(self) -> bool:
        """Whether it shows tools: it writes the tool's name, or refuses the question with a tool."""
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
        # A list that is written as a list is not supported.
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
                # The template writes both alike: the model's own bytes are better.
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
    """Build a user message, a call and its result."""
    function = {"name": "look", "arguments": {"key": _MARK} if arguments is None else arguments}
    call = {"id": id, "type": "function", "function": function}
    return [
        _USER,
        {"role": "assistant", "content": content, "tool_calls": [call], **more},
        {"role": "tool", "content": "seen", "tool_call_id": id, "name": "look"},
    ]


# Trial of a template before parts of conversations are rendered with it (prompt_cache.py)

SMALL = 2
"""Largest number with which templates usually compare indices and counts."""


def counts_messages(tree: nodes.Template) -> bool:
    """Whether a template may compare the position or number of messages with a number.

    `{% if loop.index > 20 %}` does; `{% if name | length > 20 %}` does not, if `name` is not a list of
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
    """Whether a table of the template itself is read: `budgets[16384]`."""
    return isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and node.node.name in tables


def _is_large(node: nodes.Node) -> bool:
    inner = (child.expr if isinstance(child, nodes.Operand) else child for child in node.iter_child_nodes())
    values = [child.value for child in inner if isinstance(child, nodes.Const)]
    return any(type(value) is int and value > SMALL for value in values)


def _is_length(node: nodes.Node) -> bool:
    """Whether the length of something other than messages is compared."""
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
    # Rounds of calls in the user's turns, in order; reasoning; parallel calls.
    ((14,), "", (1,)),
    ((14,), "m", (1,)),
    ((5, 0), "m", (1, 2)),
    ((1, 0, 3, 0, 0, 2), "", (2, 1, 1)),
    ((0,), "m", (1,)),
)
_TRIAL_LENGTH = 34


def trial_messages() -> Iterator[list[Message]]:
    """Yield conversations of a few words, one for each pattern of turns."""
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
        tool_calls = tuple(ToolCall(id=id_, name=f"f{number % 3}", arguments='{"a": 1}') for id_ in ids)
        reasoning = f"{mind}{start}{number}" if mind else None
        content = ("", f"a{start}{number}", None)[number % 3]
        yield Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tool_calls)
        for id_ in ids:
            yield Message(role="tool", content=f"r{id_}", tool_call_id=id_)
    yield Message(role="assistant", content=f"z{start}", reasoning=f"{mind}{start}" if mind else None)
