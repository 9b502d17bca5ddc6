"""What a grammar in Lark may cost, asked before it is compiled.

llguidance follows names by recursion, and takes time that grows with the square of an expression.
"""

import re

from dragoman.errors import BadRequest
from dragoman.limits import Limits, check_count

MOST_DEPTH = 500
# Nothing is tried in a second way, which would take time that grows with the square of the text.
_PIECES = re.compile(
    r"""(?: (?:\#|//)[^\n]*+ | \\. )
      | (?: "(?:\\.|[^"\\])*+" )
      | (?P<pattern> /(?:\\.|[^/\\])++/ )
      | (?P<defined> ^[ \t]*+[!?]*+[_a-zA-Z][\w-]*+ (?=[^:\n"/]*+:) )
      | (?P<name> [_a-zA-Z][\w-]*+ )""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def check_lark(grammar: str, param: str, limits: Limits) -> None:
    """Raises where an expression is too long, or names lead to names too often."""
    used: dict[str, list[str]] = {}
    bodies: dict[str, int] = {}
    current = ""
    for piece in _PIECES.finditer(grammar):
        if piece["defined"]:
            current = piece["defined"].strip().lstrip("!?")
            used[current] = []
        elif piece["name"] and current:
            used[current].append(piece["name"])
        elif piece["pattern"]:
            bodies[current] = bodies.get(current, 0) + len(piece["pattern"])
    for name, length in bodies.items():
        check_count(length, limits.pattern_chars, param, f"characters of the expressions of {name[:64]!r}")
    if count_depth(used, "start") > MOST_DEPTH:
        message = f"'{param}' has names that lead to further names more than {MOST_DEPTH} times."
        raise BadRequest(message, param=param, code="limit_exceeded")


def count_depth(used: dict[str, list[str]], start: str) -> int:
    """How deep one gets who goes into each name at its first use, as llguidance does."""
    seen, path, deepest = {start}, [iter(used.get(start, ()))], 1
    while path:
        name = next((name for name in path[-1] if name not in seen), None)
        if name is None:
            path.pop()
        else:
            seen.add(name)
            path.append(iter(used.get(name, ())))
            deepest = max(deepest, len(path))
    return deepest
