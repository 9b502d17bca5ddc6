"""What one rendering may cost. A template is a program from a file somebody downloaded.

`RenderBudget` is spent from; `GROWTH_OF_METHODS` and `GROWTH_OF_FILTERS` say beforehand how large a result
would be, so that `'a' * 10**9` ends in an error and not in a gigabyte; `Metering` puts the spending into a
template's tree.

Rules of this file:
- every loop turn, macro call, filter, call, operator and output spends; at nothing, rendering stops;
- what could be larger than its operands together is measured before it is made, everything else after;
- a container weighs what it would be as text, shared parts counted each time they occur, so that neither
  `[x, x]` forty times over nor its comparison can take for ever;
- processor time is looked at as well, for the few operations that spend nothing.
"""

import gc
import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Sized, ValuesView
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

STEP = 8
"""Units a step costs; a character made costs one."""
BASE_UNITS = 32_000_000
UNITS_PER_INPUT = 64
LOOK_EVERY = 1024
"""Units between two looks at the clock."""
MAX_WEIGHT = 32_000_000
MAX_INT_BITS = 4096
BASE_SECONDS = 1.0
"""Of the thread. Where a large process collects its garbage in it, which may take as long, it gets them once
more."""
SECONDS_PER_INPUT = 0.5e-6

_CONTAINERS = (list, tuple, dict, ItemsView, KeysView, ValuesView)


class Exhausted(Exception):
    """The rendering costs more than it may."""


class RenderBudget:
    """Counts down while a template renders."""

    def __init__(self) -> None:
        self._left = BASE_UNITS
        self._look = BASE_UNITS
        self._deadline = time.thread_time() + BASE_SECONDS
        self._earliest = time.monotonic() + BASE_SECONDS
        """Before it the deadline cannot have come, and this clock costs a fiftieth of a thread's own."""
        self._collections: int | None = _count_collections()
        self._weights: dict[int, int] = {}
        self._inputs: dict[int, Any] = {}
        self._made: list[Any] = []

    def copy(self, value: Any) -> Any:
        """A copy of plain data for the template to see; anything else is refused.

        The more there is to render, the more rendering may cost.
        """
        copied, weight = self._copy(value)
        self._left += UNITS_PER_INPUT * weight
        self._look = self._left
        self._deadline += SECONDS_PER_INPUT * weight
        return copied

    def spend(self, units: int) -> None:
        self._left -= units + STEP
        if self._left < self._look:
            if self._left < 0 or (self._is_late() and not self._has_reason()):
                raise Exhausted("the chat template takes too long or makes too much text")
            self._look = max(0, self._left - LOOK_EVERY)

    def _is_late(self) -> bool:
        return time.monotonic() > self._earliest and time.thread_time() > self._deadline

    def _has_reason(self) -> bool:
        """Whether it may go on for once, because it was not the template that took so long."""
        before, self._collections = self._collections, None
        if before is None or before == _count_collections():
            return False
        self._deadline = time.thread_time() + BASE_SECONDS
        return True

    def take(self, value: Any) -> Any:
        """Spend for a value that an operation has just made: `'ab' + 'c'` costs 3 and a step."""
        if isinstance(value, str):
            self.spend(len(value))
        elif value is None or value is True or value is False:
            self.spend(1)
        elif isinstance(value, _CONTAINERS):
            self.weigh(value)
            self.spend(len(value))
        else:
            if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
                raise Exhausted("the chat template makes a number that is too large")
            self.spend(1)
        return value

    def weigh(self, value: Any) -> int:
        """The weight of a value: `['ab', 1]` weighs 3 + 1 + 2."""
        if isinstance(value, str):
            return len(value) + 1
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            known = self._weigh_container(value)
        return known

    def changed(self, value: Any) -> None:
        """A template has changed a container: what was known of those around it is out of date."""
        stale, self._made = self._made, []
        if id(value) in self._inputs:
            stale = [*self._inputs.values(), *stale]
        self.spend(len(stale))
        for each in stale:
            self._weights.pop(id(each), None)
        for each in stale:
            self.weigh(each)

    def _weigh_container(self, value: Any) -> int:
        # Held, so that its id is not given to another object while the weight is kept.
        self._made.append(value)
        self._weights[id(value)] = MAX_WEIGHT
        weight = 2 + sum(map(self.weigh, _children(value)))
        if weight > MAX_WEIGHT:
            raise Exhausted("the chat template makes too large a value")
        self._weights[id(value)] = weight
        return weight

    def _copy(self, value: Any) -> tuple[Any, int]:
        if type(value) is str:
            return value, len(value) + 1
        if isinstance(value, str):
            # A subclass may carry methods of its own.
            return str.__str__(value), len(value) + 1
        if value is None or isinstance(value, (bool, int, float)):
            return value, 1
        copied: Any
        weight = 2
        if isinstance(value, dict):
            copied = {}
            for key, each in value.items():
                weight += len(key) + 1 if type(key) is str else self._copy(key)[1]
                if type(each) is str:
                    # As it mostly is.
                    copied[key] = each
                    weight += len(each) + 1
                elif each is None or each is True or each is False:
                    copied[key] = each
                    weight += 1
                else:
                    copied[key], inner = self._copy(each)
                    weight += inner
        elif isinstance(value, (list, tuple)):
            copied = []
            for each in value:
                made, inner = self._copy(each)
                copied.append(made)
                weight += inner
        else:
            raise TypeError(f"a template is given plain data only, not {type(value).__name__}")
        self._inputs[id(copied)] = copied
        self._weights[id(copied)] = weight
        return copied, weight


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value)


# How large a result would be. Methods and filters that share a name share a row.

# A width of five digits or more, or one that is taken from an operand.
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")
_FORMAT_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")
_TOO_MUCH = 1 << 62


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def width_of(value: Any) -> int:
    """A width or a count; a string stands for its own length."""
    if isinstance(value, (int, float)):
        return int(min(abs(value), _TOO_MUCH))
    return _length(value)


def _widest(*args: Any, **kwargs: Any) -> int:
    return max(map(width_of, (*args[1:], *kwargs.values())), default=1)


def _per_line(value: Any, *args: Any, **kwargs: Any) -> int:
    return (str(value).count("\n") + 2) * _widest(value, *args, **kwargs)


def _per_tab(value: Any, *args: Any, **kwargs: Any) -> int:
    return str(value).count("\t") * _widest(value, *args, **kwargs)


def _replace(value: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    text = str(value)
    return len(text) + text.count(str(old)) * len(str(new))


def _join(value: Any, d: Any = "", attribute: Any = None) -> int:
    return _length(value) * len(str(d))


def _wordwrap(value: Any, *args: Any, **kwargs: Any) -> int:
    return _length(value) * max(map(_length, (*args, *kwargs.values())), default=1)


def _format(value: Any, *_: Any, **__: Any) -> int:
    return _TOO_MUCH if _FORMAT_WIDTH.search(value) else 1


def percent_size(value: Any, *_: Any, **__: Any) -> int:
    return _TOO_MUCH if isinstance(value, str) and _PERCENT_WIDTH.search(value) else 1


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> int:
    # Adding lists copies again what was added before.
    return _length(value) ** 2 // 32 if isinstance(start, (list, tuple)) else 1


GROWTH_OF_METHODS: dict[str, Callable[..., int]] = {
    "center": _widest,
    "expandtabs": _per_tab,
    "format": _format,
    "format_map": _format,
    "join": lambda separator, parts=(): _join(parts, separator),
    "ljust": _widest,
    "replace": _replace,
    "rjust": _widest,
    "zfill": _widest,
}

GROWTH_OF_FILTERS: dict[str, Callable[..., int]] = {
    "batch": _widest,
    "center": _widest,
    "format": percent_size,
    "indent": _per_line,
    "join": _join,
    "replace": _replace,
    "round": _widest,
    "slice": _widest,
    "sum": _sum,
    "wordwrap": _wordwrap,
}


def product_size(left: Any, right: Any, weigh: Callable[[Any], int]) -> int:
    """`product_size('ab', 3, weigh)` is 9."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            return weigh(sequence) * max(0, count)
    return 1


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
        raise Exhausted("the chat template makes a number that is too large")


# The spending in a template: each loop turn, each macro call, each value that is made.

TICK, TAKE, CONCAT = " tick", " take", " concat"
"""Filters of ours. The space keeps their names out of a template's reach."""


class Metering(NodeTransformer):
    """Puts the spending into a template's tree.

    `{% for x in y %}z{% endfor %}` becomes `{% for x in y %}{% do 1 | tick %}z{% endfor %}`, in effect.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._tick_body(node)
        if node.test is not None:
            node.test = nodes.And(nodes.Not(_filter(nodes.Const(1), TICK)), node.test)
        return node

    def _tick_body(self, node: Any) -> nodes.Node:
        literal = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(literal), TICK)).set_lineno(node.lineno))
        tree: nodes.Node = node
        return tree

    visit_Macro = visit_CallBlock = visit_Block = _tick_body

    def _take(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, TAKE)

    visit_List = visit_Dict = _take

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, TAKE) if node.ctx == "load" and node.items else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, TAKE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), CONCAT)


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None)
    made.set_lineno(node.lineno or 1)
    return made


def _count_collections() -> int:
    """Full ones, of all there is."""
    count: int = gc.get_stats()[2]["collections"]
    return count
