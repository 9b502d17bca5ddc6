"""What one rendering may cost. A template is a program from a file somebody downloaded.

Rules of this file:
- every loop turn, macro call, filter, call, operator and output spends; at nothing, rendering stops;
- what could be larger than its operands together is measured before it is made, everything else after;
- a container weighs what it would be as text, shared parts counted each time they occur, so that neither
  `[x, x]` forty times over nor its comparison can take for ever;
- processor time is looked at as well, for the few operations that spend nothing.
"""

import time
from collections.abc import ItemsView, Iterable, KeysView, ValuesView
from typing import Any

STEP = 8
"""Units a step costs; a character made costs one."""
BASE_UNITS = 32_000_000
UNITS_PER_INPUT = 64
LOOK_EVERY = 1024
"""Units between two looks at the clock."""
MAX_WEIGHT = 32_000_000
MAX_INT_BITS = 4096
BASE_SECONDS = 1.0
"""Of the thread, in which a large process may also collect its garbage."""
SECONDS_PER_INPUT = 0.5e-6

_CONTAINERS = (list, tuple, dict, ItemsView, KeysView, ValuesView)


class Exhausted(Exception):
    """The rendering costs more than it may."""


class Budget:
    """Counts down while a template renders."""

    def __init__(self) -> None:
        self._left = BASE_UNITS
        self._look = BASE_UNITS
        self._deadline = time.thread_time() + BASE_SECONDS
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
            if self._left < 0 or time.thread_time() > self._deadline:
                raise Exhausted("the chat template takes too long or makes too much text")
            self._look = max(0, self._left - LOOK_EVERY)

    def take(self, value: Any) -> Any:
        """Spend for a value that an operation has just made: `'ab' + 'c'` costs 3 and a step."""
        if isinstance(value, str):
            self.spend(len(value))
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
                copied[key], inner = self._copy(each)
                weight += inner + self._copy(key)[1]
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
