"""Limits on the cost of one rendering. A template is a program from a downloaded file.

`RenderBudget` is spent from; `GROWTH_OF_METHODS` and `GROWTH_OF_FILTERS` estimate the size of a result
beforehand, so that `'a' * 10**9` ends in an error instead of a gigabyte; `BudgetInstrumenter` adds the
spending to a template's tree.

Rules of this file:
- every loop iteration, macro call, filter, call, operator and output spends; without units left, rendering
  stops;
- a result that may be larger than its operands together is measured before it is made, all others after;
- the weight of a container is its size as text, with shared parts counted each time, so that neither `[x, x]`
  nested forty times nor comparing it can run for minutes;
- CPU time is checked as well, for the few operations that do not spend.
"""

import gc
import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Sized, ValuesView
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

STEP = 8
"""Units per step; a character of output costs one unit."""
BASE_UNITS = 32_000_000
UNITS_PER_INPUT = 64
LOOK_EVERY = 1024
"""Units between two checks of the clock."""
MAX_WEIGHT = 32_000_000
MAX_INT_BITS = 4096
BASE_SECONDS = 1.0
"""CPU time of the thread. If a large process collects garbage in this thread, which may take as long, the
rendering gets this time once more.
"""
SECONDS_PER_INPUT = 0.5e-6

_CONTAINERS = (list, tuple, dict, ItemsView, KeysView, ValuesView)


class RenderBudgetExceeded(Exception):
    """The rendering exceeds its budget."""


class RenderBudget:
    """Budget of one rendering, counted down while the template runs."""

    def __init__(self) -> None:
        self._left = BASE_UNITS
        self._look = BASE_UNITS
        self._deadline = time.thread_time() + BASE_SECONDS
        self._earliest = time.monotonic() + BASE_SECONDS
        """Time before which the deadline cannot have passed; this clock costs a fiftieth
        of the thread clock.
        """
        self._collections: int | None = _count_collections()
        self._weights: dict[int, int] = {}
        self._inputs: dict[int, Any] = {}
        self._made: list[Any] = []

    def copy(self, value: Any) -> Any:
        """Copy plain data for the template; refuse anything else.

        The budget grows with the data.
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
                raise RenderBudgetExceeded("the chat template takes too long or writes too much text")
            self._look = max(0, self._left - LOOK_EVERY)

    def _is_late(self) -> bool:
        return time.monotonic() > self._earliest and time.thread_time() > self._deadline

    def _has_reason(self) -> bool:
        """Whether rendering may continue once more, because garbage collection took the time, not the
        template.
        """
        before, self._collections = self._collections, None
        if before is None or before == _count_collections():
            return False
        self._deadline = time.thread_time() + BASE_SECONDS
        return True

    def take(self, value: Any) -> Any:
        """Spend for a value that an operation has produced: `'ab' + 'c'` costs 3 and a step."""
        if isinstance(value, str):
            self.spend(len(value))
        elif value is None or value is True or value is False:
            self.spend(1)
        elif isinstance(value, _CONTAINERS):
            self.weigh(value)
            self.spend(len(value))
        else:
            if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
                raise RenderBudgetExceeded("the chat template computes a number that is too large")
            self.spend(1)
        return value

    def weigh(self, value: Any) -> int:
        """Return the weight of a value: `['ab', 1]` weighs 3 + 1 + 2."""
        if isinstance(value, str):
            return len(value) + 1
        if not isinstance(value, _CONTAINERS):
            return 1
        weight = self._weights.get(id(value))
        if weight is None:
            weight = self._weigh_container(value)
        return weight

    def changed(self, value: Any) -> None:
        """Recompute weights after the template has changed a container: those of containers around it are
        stale.
        """
        stale, self._made = self._made, []
        if id(value) in self._inputs:
            stale = [*self._inputs.values(), *stale]
        self.spend(len(stale))
        for container in stale:
            self._weights.pop(id(container), None)
        for container in stale:
            self.weigh(container)

    def _weigh_container(self, value: Any) -> int:
        # Kept alive, so that its id is not reused while the weight is cached.
        self._made.append(value)
        self._weights[id(value)] = MAX_WEIGHT
        weight = 2 + sum(map(self.weigh, _children(value)))
        if weight > MAX_WEIGHT:
            raise RenderBudgetExceeded("the chat template builds a value that is too large")
        self._weights[id(value)] = weight
        return weight

    def _copy(self, value: Any) -> tuple[Any, int]:
        if type(value) is str:
            return value, len(value) + 1
        if isinstance(value, str):
            # A subclass may have methods of its own.
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
                    # The common case.
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
                result, inner = self._copy(each)
                copied.append(result)
                weight += inner
        else:
            raise TypeError(f"a template accepts plain data only, not {type(value).__name__}")
        self._inputs[id(copied)] = copied
        self._weights[id(copied)] = weight
        return copied, weight


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value)


# Estimates of result sizes. Methods and filters that share a name share a row.

# A width of five digits or more, or one taken from an operand.
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")
_FORMAT_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")
_TOO_MUCH = 1 << 62


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def width_of(value: Any) -> int:
    """Return a width or a count; for a string, its length."""
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
    # Adding lists copies earlier elements again.
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
    """Return the size of a product: `product_size('ab', 3, weigh)` is 9."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            return weigh(sequence) * max(0, count)
    return 1


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
        raise RenderBudgetExceeded("the chat template computes a number that is too large")


# Spending in a template: per loop iteration, macro call and value.

TICK, TAKE, CONCAT = " tick", " take", " concat"
"""Our own filters. The space makes their names unreachable for templates."""


class BudgetInstrumenter(NodeTransformer):
    """Adds the spending to a template's tree.

    `{% for x in y %}z{% endfor %}` becomes in effect `{% for x in y %}{% do 1 | tick %}z{% endfor %}`.
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
    filtered = nodes.Filter(node, name, [], [], None, None)
    filtered.set_lineno(node.lineno or 1)
    return filtered


def _count_collections() -> int:
    """Return the number of full garbage collections in the process."""
    count: int = gc.get_stats()[2]["collections"]
    return count
