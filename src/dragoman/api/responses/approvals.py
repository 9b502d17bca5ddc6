"""What is approved is a call of a tool as it was described then; the id of the question keeps which one."""

import re

_PINNED = re.compile(r"mcpr_(?P<pin>[0-9a-f]{16})_")


def prefix_of(pin: str) -> str:
    """What the id of a question begins with."""
    return f"mcpr_{pin}_" if pin else "mcpr_"


def pin_in(question: str) -> str | None:
    """That of the tool which the question was about. A question that is not ours tells nothing."""
    found = _PINNED.match(question)
    return found["pin"] if found else None
