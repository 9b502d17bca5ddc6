"""What stands around reasoning in a template's answers."""

import re

from dragoman.dialects.declare import Reasoning
from dragoman.prompt.differences import is_marker, segments, shared_end, shared_start, without_end
from dragoman.prompt.probe import MIND, TEXT, Probe, call

_PAIR = re.compile(r"(<([\w:|]{1,32})>|\[([A-Z]{1,32})\])\s*(</\2>|\[/\3\])\s*$")
_CLOSE = re.compile(r"</[\w:]{0,32}think\w{0,16}>|\[/THINK\w{0,16}\]|◁/think▷", re.IGNORECASE)


def derive_reasoning(probe: Probe, source: str) -> Reasoning | None:
    """By an answer with reasoning, by a prompt without it, or by the markers that the template looks for."""
    return _before_text(probe) or _before_call(probe) or _switched(probe) or _looked_for(source)


def empty_pair(reasoning: Reasoning | None) -> re.Pattern[str]:
    """Where there is no reasoning, many templates write its markers with nothing in them."""
    if reasoning is None or not reasoning.open:
        return re.compile(r"(?!)")
    opened, close = (re.escape(each[0].strip()) for each in (reasoning.open, reasoning.close))
    return re.compile(rf"{opened}\s*{close}\s*")


def _before_text(probe: Probe) -> Reasoning | None:
    """`<think>\\nM\\n</think>\\n\\nT`, against `T` alone."""
    both, text = probe.answer(text=TEXT, mind=MIND), probe.answer(text=TEXT)
    if both is None or text is None or MIND not in both.text or TEXT not in both.text:
        return None
    before, _, rest = both.text.partition(MIND)
    between, found, _ = rest.partition(TEXT)
    head = text.text.partition(TEXT)[0]
    if not found or not between.strip():
        return None
    # What stands before text also when there is no reasoning is not the end of reasoning.
    frame = "" if head.endswith(between) else shared_end(between, head)
    close = without_end(between, frame) if without_end(between, frame).strip() else between
    if before == head:
        return _delimited(probe.generation(), head, close)
    opened = _opening(before, head, close)
    return Reasoning(open=(opened,) if opened else (), close=(close,))


def _delimited(prompt: str, head: str, close: str) -> Reasoning:
    """Nothing opens it in an answer. What the prompt says beyond the turn's head does, and belongs to it."""
    preface = prompt.removeprefix(head) if prompt.startswith(head) else ""
    return Reasoning(open=(preface,) if preface.strip() else (), close=(close,), preface=preface)


def _before_call(probe: Probe) -> Reasoning | None:
    """Some templates keep reasoning only where a call follows."""
    both, alone = probe.answer(call(0), mind=MIND), probe.answer(call(0))
    if both is None or alone is None or MIND not in both.text:
        return None
    before, _, rest = both.text.partition(MIND)
    close = without_end(rest, shared_end(rest, alone.text))
    if not close.strip():
        close = next((part for part in segments(rest) if not part.isspace()), "")
    opened = _opening(before, alone.text, close)
    return Reasoning(open=(opened,), close=(close,)) if opened and len(close) > 2 else None


def _opening(text: str, without: str, close: str) -> str:
    """`assistant\\n<think>\\n` gives `<think>\\n`. A part of the closing marker is not enough.

    Where a word is last, as in `<channel>thought`, it is what stands there only when there is reasoning.
    """
    parts = segments(text)
    if not text.strip() or not is_marker(segments(text.rstrip())[-1]):
        added = text[len(shared_start(text, without)) :]
        return added if any(map(is_marker, segments(added))) else ""
    for start in reversed(range(len(parts))):
        opened = "".join(parts[start:])
        if is_marker(parts[start]) and opened.strip() not in close:
            return opened
    return ""


def _switched(probe: Probe) -> Reasoning | None:
    """A prompt that ends with an empty pair when thinking is off."""
    for off in ({"enable_thinking": False, "thinking": False}, {}):
        prompt = probe.generation(**off)
        pair = _PAIR.search(prompt)
        if pair is not None:
            return Reasoning(open=(pair[1] + "\n",), close=("\n" + pair[4] + "\n\n",))
    return None


def _looked_for(source: str) -> Reasoning | None:
    """Templates that take reasoning out of old answers name its end."""
    close = _CLOSE.search(source)
    if close is None:
        return None
    opened = close[0].replace("/", "", 1)
    return Reasoning(open=(opened + "\n",), close=("\n" + close[0] + "\n\n",))
