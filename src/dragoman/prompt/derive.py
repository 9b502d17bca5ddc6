"""Derives the dialect of an unknown model family: renders its template with known answers and compares the
results.

Only what can be verified is concluded: the template's calls must parse back to the same calls.
"""

import json
import re
from collections.abc import Mapping

from msgspec.structs import replace

from dragoman.dialects.declarations import Calls, Dialect, ReasoningSyntax, TaggedCalls
from dragoman.dialects.parser import parse
from dragoman.errors import TemplateError
from dragoman.prompt.derive_calls import AnswerBodies, derive_calls
from dragoman.prompt.probe import (
    IDS,
    KEYS,
    MIND,
    NUMBER,
    TEXT,
    VALUES,
    ProbeSample,
    TemplateProbe,
    common_prefix,
    is_marker,
    make_call,
    segments,
    shared_end,
    without_end,
)
from dragoman.types import ToolCall

_TWO_ARGUMENTS = json.dumps(dict(zip(KEYS, VALUES, strict=True)))
_TURN_END = re.compile(r"eo[smt]\b|eo[smt][_:]|im_end|end.?of.?(turn|text|sentence|msg)", re.IGNORECASE)


class TemplateAnalysis:
    """Analysis of what a template writes.

    `TemplateAnalysis(source).dialect()` is the derived dialect, or None.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._probe = TemplateProbe(source, special or {})
        self._samples = self._calls()

    def dialect(self) -> Dialect | None:
        reasoning = derive_reasoning(self._probe, self._source)
        calls = self._derived_calls(reasoning)
        if reasoning is None and calls is None:
            return None
        drops = self._text_frame(reasoning)
        if reasoning is not None and calls is not None and calls.open:
            # A call treated as reasoning would be lost; a call without a marker may be prose.
            reasoning = replace(reasoning, ended_by_call=True)
        return _dialect(reasoning, calls, drops)

    def reads(self, dialect: Dialect) -> bool | None:
        """Whether a dialect parses the calls that the template writes; None if it writes none."""
        if not self._samples:
            return None
        prompt = self._probe.generation()
        return all(_reads_back(sample, prompt, dialect) for sample in self._samples)

    def _calls(self) -> list[ProbeSample]:
        """Return answers with calls in which all inputs can be found."""
        answers = (
            self._probe.answer(make_call(0)),
            self._probe.answer(make_call(0), make_call(1)),
            self._probe.answer(make_call(0, _TWO_ARGUMENTS)),
        )
        return [sample for sample in answers if sample is not None and _complete(sample)]

    def _derived_calls(self, reasoning: ReasoningSyntax | None) -> Calls | None:
        bodies = self._bodies(empty_pair(reasoning))
        calls = derive_calls(bodies) if bodies else None
        if isinstance(calls, TaggedCalls) and "<![CDATA[" in self._source:
            calls = replace(calls, cdata=True)
        if calls is None or not self.reads(_dialect(reasoning, calls)):
            return None
        return calls

    def _bodies(self, empty: re.Pattern[str]) -> AnswerBodies | None:
        plain = self._probe.answer(text=TEXT)
        if not self._samples or plain is None or TEXT not in plain.text:
            return None
        before, _, after = empty.sub("", plain.text).partition(TEXT)
        head = common_prefix(empty.sub("", self._samples[0].text), before)

        def body(*calls: ToolCall) -> str | None:
            sample = self._probe.answer(*calls)
            written = empty.sub("", sample.text) if sample is not None and _complete(sample) else ""
            if not written.startswith(head):
                return None
            return _without_turn_end(written[len(head) :], after).replace(IDS[1], IDS[0])

        single = body(make_call(0))
        if single is None:
            return None
        return AnswerBodies(
            one=single,
            two=body(make_call(0), make_call(1)),
            pair=body(make_call(0, _TWO_ARGUMENTS)),
            number=body(make_call(0, json.dumps({KEYS[0]: NUMBER}))),
        )

    def _text_frame(self, reasoning: ReasoningSyntax | None) -> tuple[str, ...]:
        """Return markers around text that are not text: `<|START_TEXT|>`, `<|END_TEXT|>`."""
        plain = self._probe.answer(text=TEXT)
        if plain is None or not self._samples:
            return ()
        before, _, after = empty_pair(reasoning).sub("", plain.text).partition(TEXT)
        close = reasoning.close[0].strip() if reasoning is not None else "\0"
        opened = before[len(common_prefix(before, self._probe.generation())) :].replace(close, "").strip()
        if not _is_framed(opened):
            return ()
        closed = without_end(after, shared_end(after, self._samples[0].text)).strip()
        return (opened, closed) if _is_framed(closed) else (opened,)


def examine(source: str, special: Mapping[str, str] | None = None) -> TemplateAnalysis | None:
    """Analyse a template; return None if it cannot be compiled or does not terminate."""
    try:
        return TemplateAnalysis(source, special)
    except TemplateError:
        return None


def _dialect(reasoning: ReasoningSyntax | None, calls: Calls | None, drops: tuple[str, ...] = ()) -> Dialect:
    return Dialect(
        name="derived",
        models="derived from a chat template",
        reasoning=reasoning,
        calls=() if calls is None else (calls,),
        drops=drops,
    )


def _is_framed(text: str) -> bool:
    parts = segments(text)
    return bool(parts) and is_marker(parts[0]) and is_marker(parts[-1])


def _without_turn_end(written: str, after_text: str) -> str:
    """Remove the end of the turn: what also follows text, and tokens with common names for the end of
    something.
    """
    written = without_end(written, shared_end(written, after_text))
    parts = segments(written)
    while parts and (parts[-1].isspace() or _ends_turn(parts[-1], after_text)):
        parts.pop()
    # Layout stays with the call, unless a token after it was removed.
    return written if not any(map(is_marker, segments(written[len("".join(parts)) :]))) else "".join(parts)


def _ends_turn(part: str, after_text: str) -> bool:
    return is_marker(part) and (part in after_text or _TURN_END.search(part) is not None)


def _complete(sample: ProbeSample) -> bool:
    words = (word for call in sample.calls for word in (call.name, *json.loads(call.arguments)))
    return all(word in sample.text for word in words)


def _reads_back(sample: ProbeSample, prompt: str, dialect: Dialect) -> bool:
    written = sample.text[len(common_prefix(sample.text, prompt)) :]
    try:
        read = parse(written, dialect).calls
    except Exception:
        return False
    return [_plain(call) for call in read] == [_plain(call) for call in sample.calls]


def _plain(call: ToolCall) -> tuple[str, object]:
    try:
        return call.name, json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.name, None


# Markers of reasoning in a template's answers

_EMPTY_PAIR = re.compile(r"(<([\w:|]{1,32})>|\[([A-Z]{1,32})\])\s*(</\2>|\[/\3\])\s*$")
_CLOSE = re.compile(r"</[\w:]{0,32}think\w{0,16}>|\[/THINK\w{0,16}\]|◁/think▷", re.IGNORECASE)


def derive_reasoning(probe: TemplateProbe, source: str) -> ReasoningSyntax | None:
    """Derive reasoning markers from an answer with reasoning, from a prompt without it, or from markers in
    the source.
    """
    shown = _reasoning_before_text(probe) or _reasoning_before_call(probe)
    return shown or _reasoning_switched_off(probe) or _reasoning_looked_for(source)


def empty_pair(reasoning: ReasoningSyntax | None) -> re.Pattern[str]:
    """Return a pattern of empty reasoning, which many templates write where there is none."""
    if reasoning is None or not reasoning.open:
        return re.compile(r"(?!)")
    opened, close = (re.escape(each[0].strip()) for each in (reasoning.open, reasoning.close))
    return re.compile(rf"{opened}\s*{close}\s*")


def _reasoning_before_text(probe: TemplateProbe) -> ReasoningSyntax | None:
    """Compare `<think>\\nM\\n</think>\\n\\nT` with `T` alone."""
    both, text = probe.answer(text=TEXT, mind=MIND), probe.answer(text=TEXT)
    if both is None or text is None or MIND not in both.text or TEXT not in both.text:
        return None
    before, _, rest = both.text.partition(MIND)
    between, value, _ = rest.partition(TEXT)
    head = text.text.partition(TEXT)[0]
    if not value or not between.strip():
        return None
    # Text that also precedes an answer without reasoning is not the end of reasoning.
    frame = "" if head.endswith(between) else shared_end(between, head)
    close = without_end(between, frame) if without_end(between, frame).strip() else between
    if before == head:
        return _delimited_reasoning(probe.generation(), head, close)
    opened = _opening(before, head, close)
    return ReasoningSyntax(open=(opened,) if opened else (), close=(close,))


def _delimited_reasoning(prompt: str, head: str, close: str) -> ReasoningSyntax:
    """Return markers of reasoning that nothing opens in an answer. The prompt's text after the head opens it
    and belongs to it.
    """
    preface = prompt.removeprefix(head) if prompt.startswith(head) else ""
    return ReasoningSyntax(open=(preface,) if preface.strip() else (), close=(close,), preface=preface)


def _reasoning_before_call(probe: TemplateProbe) -> ReasoningSyntax | None:
    """Derive markers from an answer with a call; some templates keep reasoning only before calls."""
    both, alone = probe.answer(make_call(0), mind=MIND), probe.answer(make_call(0))
    if both is None or alone is None or MIND not in both.text:
        return None
    before, _, rest = both.text.partition(MIND)
    close = without_end(rest, shared_end(rest, alone.text))
    if not close.strip():
        close = next((part for part in segments(rest) if not part.isspace()), "")
    opened = _opening(before, alone.text, close)
    return ReasoningSyntax(open=(opened,), close=(close,)) if opened and len(close) > 2 else None


def _opening(text: str, without: str, close: str) -> str:
    """Return the opening marker: `assistant\\n<think>\\n` gives `<think>\\n`. It must not be part of the
    closing marker.

    If the text ends with a word, as in `<channel>thought`, it is the text added where there is reasoning.
    """
    parts = segments(text)
    if not text.strip() or not is_marker(segments(text.rstrip())[-1]):
        added = text[len(common_prefix(text, without)) :]
        return added if any(map(is_marker, segments(added))) else ""
    for start in reversed(range(len(parts))):
        opened = "".join(parts[start:])
        if is_marker(parts[start]) and opened.strip() not in close:
            return opened
    return ""


def _reasoning_switched_off(probe: TemplateProbe) -> ReasoningSyntax | None:
    """Derive markers from a prompt that ends with an empty pair when reasoning is off."""
    for off in ({"enable_thinking": False, "thinking": False}, {}):
        prompt = probe.generation(**off)
        pair = _EMPTY_PAIR.search(prompt)
        if pair is not None:
            return ReasoningSyntax(open=(pair[1] + "\n",), close=("\n" + pair[4] + "\n\n",))
    return None


def _reasoning_looked_for(source: str) -> ReasoningSyntax | None:
    """Derive markers from the source: templates that remove reasoning from old answers name its end."""
    close = _CLOSE.search(source)
    if close is None:
        return None
    opened = close[0].replace("/", "", 1)
    return ReasoningSyntax(open=(opened + "\n",), close=("\n" + close[0] + "\n\n",))
