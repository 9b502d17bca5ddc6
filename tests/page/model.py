"""A model that says what the page is to show: what it is told, but for a few words that stand for more."""

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.types import Job
from tests.support.parrot import call, messages_of, parrot, repeated

TOUR = """\
### Two sorted lists

Take the **smaller** head each time, as `heapq.merge` does; see [the manual](https://docs.python.org/3/).

```python
def merge(a: list[int], b: list[int]) -> list[int]:
    out = []
    while a and b:
        out.append((a if a[0] < b[0] else b).pop(0))
    return out + a + b
```

1. It is *linear*
2. It empties its arguments
   - copy them first
   - or keep two indices

| way | time |
| --- | ---: |
| `merge` | 12 ms |
| `sorted(a + b)` | 19 ms |

> Measure before you choose.
"""
THOUGHT = "The lists are sorted, so only their heads matter."
SAYS = {
    "tour": TOUR,
    "Merge two sorted lists in Python.": f"<think>\n{THOUGHT}\n</think>\n{TOUR}",
    "think": f"<think>\n{THOUGHT}\n</think>\nDone.",
    "What is the weather in Lisbon?": call("get_weather", city="Lisbon", unit="celsius"),
    "two calls": call("get_weather", city="Lisbon") + "\n" + call("get_weather", city="Porto"),
    "add": call("add", a=1, b=2),
}


def answer(job: Job) -> Script:
    messages = messages_of(job)
    role, text = messages[-1]
    if role == "tool" and text.startswith("{"):
        return say("It is **21 °C** in Lisbon, and the sun shines.")
    return say(SAYS[text]) if text in SAYS else repeated(job)


def make_model(interval: float = 0.0, context: int = 200_000) -> ScriptedEngine:
    return parrot(context=context, interval=interval, answer=answer)
