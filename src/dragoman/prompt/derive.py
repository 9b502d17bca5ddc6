"""A dialect for a family never seen before: its template is rendered with known answers, which are compared.

Nothing is concluded that cannot be proved: what a template writes for calls must read back as those calls.
"""

import json
import re
from collections.abc import Mapping

from msgspec.structs import replace

from dragoman.dialects.declare import Calls, Dialect, Reasoning, TaggedCalls
from dragoman.dialects.parser import parse
from dragoman.errors import TemplateError
from dragoman.prompt.derive_calls import derive_calls
from dragoman.prompt.derive_reasoning import derive_reasoning, empty_pair
from dragoman.prompt.differences import is_marker, segments, shared_end, shared_start, without_end
from dragoman.prompt.frames import Bodies
from dragoman.prompt.probe import IDS, KEYS, NUMBER, TEXT, VALUES, Probe, Sample, call
from dragoman.types import ToolCall

_PAIR = json.dumps(dict(zip(KEYS, VALUES, strict=True)))
_TURN_END = re.compile(r"eo[smt]\b|eo[smt][_:]|im_end|end.?of.?(turn|text|sentence|msg)", re.IGNORECASE)


class Examination:
    """What a template writes, and what can be concluded from it.

    `Examination(source).dialect()` is the derived dialect, or None.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._probe = Probe(source, special or {})
        self._samples = self._calls()

    def dialect(self) -> Dialect | None:
        reasoning = derive_reasoning(self._probe, self._source)
        calls = self._derived_calls(reasoning)
        if reasoning is None and calls is None:
            return None
        drops = self._text_frame(reasoning)
        if reasoning is not None and calls is not None and calls.open:
            # A call that is kept as reasoning would be lost; one without a marker may be prose.
            reasoning = replace(reasoning, ended_by_call=True)
        return _dialect(reasoning, calls, drops)

    def reads(self, dialect: Dialect) -> bool | None:
        """Whether a dialect reads the calls that the template writes; None where it writes none."""
        if not self._samples:
            return None
        prompt = self._probe.generation()
        return all(_reads_back(sample, prompt, dialect) for sample in self._samples)

    def _calls(self) -> list[Sample]:
        """Answers with calls in which everything that was put in can be found."""
        answers = (
            self._probe.answer(call(0)),
            self._probe.answer(call(0), call(1)),
            self._probe.answer(call(0, _PAIR)),
        )
        return [each for each in answers if each is not None and _complete(each)]

    def _derived_calls(self, reasoning: Reasoning | None) -> Calls | None:
        bodies = self._bodies(empty_pair(reasoning))
        calls = derive_calls(bodies) if bodies else None
        if isinstance(calls, TaggedCalls) and "<![CDATA[" in self._source:
            calls = replace(calls, cdata=True)
        if calls is None or not self.reads(_dialect(reasoning, calls)):
            return None
        return calls

    def _bodies(self, empty: re.Pattern[str]) -> Bodies | None:
        plain = self._probe.answer(text=TEXT)
        if not self._samples or plain is None or TEXT not in plain.text:
            return None
        before, _, after = empty.sub("", plain.text).partition(TEXT)
        head = shared_start(empty.sub("", self._samples[0].text), before)

        def body(*calls: ToolCall) -> str | None:
            sample = self._probe.answer(*calls)
            written = empty.sub("", sample.text) if sample is not None and _complete(sample) else ""
            if not written.startswith(head):
                return None
            return _without_turn_end(written[len(head) :], after).replace(IDS[1], IDS[0])

        one = body(call(0))
        if one is None:
            return None
        return Bodies(
            one=one,
            two=body(call(0), call(1)),
            pair=body(call(0, _PAIR)),
            number=body(call(0, json.dumps({KEYS[0]: NUMBER}))),
        )

    def _text_frame(self, reasoning: Reasoning | None) -> tuple[str, ...]:
        """Markers around text, which are no text: `<|START_TEXT|>`, `<|END_TEXT|>`."""
        plain = self._probe.answer(text=TEXT)
        if plain is None or not self._samples:
            return ()
        before, _, after = empty_pair(reasoning).sub("", plain.text).partition(TEXT)
        close = reasoning.close[0].strip() if reasoning is not None else "\0"
        opened = before[len(shared_start(before, self._probe.generation())) :].replace(close, "").strip()
        if not _is_framed(opened):
            return ()
        closed = without_end(after, shared_end(after, self._samples[0].text)).strip()
        return (opened, closed) if _is_framed(closed) else (opened,)


def examine(source: str, special: Mapping[str, str] | None = None) -> Examination | None:
    """None for what cannot be compiled, or has no end."""
    try:
        return Examination(source, special)
    except TemplateError:
        return None


def _dialect(reasoning: Reasoning | None, calls: Calls | None, drops: tuple[str, ...] = ()) -> Dialect:
    return Dialect(
        name="derived",
        models="Read off a chat template",
        reasoning=reasoning,
        calls=() if calls is None else (calls,),
        drops=drops,
    )


def _is_framed(text: str) -> bool:
    parts = segments(text)
    return bool(parts) and is_marker(parts[0]) and is_marker(parts[-1])


def _without_turn_end(written: str, after_text: str) -> str:
    """What also follows text ends the turn, and so do the tokens that everybody calls end of something."""
    written = without_end(written, shared_end(written, after_text))
    parts = segments(written)
    while parts and (parts[-1].isspace() or _ends_turn(parts[-1], after_text)):
        parts.pop()
    # Layout stays with the call, unless a token was taken away behind it.
    return written if not any(map(is_marker, segments(written[len("".join(parts)) :]))) else "".join(parts)


def _ends_turn(part: str, after_text: str) -> bool:
    return is_marker(part) and (part in after_text or _TURN_END.search(part) is not None)


def _complete(sample: Sample) -> bool:
    words = (word for each in sample.calls for word in (each.name, *json.loads(each.arguments)))
    return all(word in sample.text for word in words)


def _reads_back(sample: Sample, prompt: str, dialect: Dialect) -> bool:
    written = sample.text[len(shared_start(sample.text, prompt)) :]
    try:
        read = parse(written, dialect).calls
    except Exception:
        return False
    return [_plain(each) for each in read] == [_plain(each) for each in sample.calls]


def _plain(each: ToolCall) -> tuple[str, object]:
    try:
        return each.name, json.loads(each.arguments)
    except (ValueError, RecursionError):
        return each.name, None
