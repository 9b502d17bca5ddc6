"""What answers amount to: rates, waits, and the medians over rounds."""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from bench.answers import Answer


class Load(Struct, frozen=True, kw_only=True):
    """So many streams at the same time."""

    streams: int
    tokens: int
    tokens_per_s: float
    """From the first request to the last token."""
    steady_per_s: float
    """From when all streams had begun until there were no more answers to begin, or the first had ended."""
    first_p50_ms: float
    first_p99_ms: float


class First(Struct, frozen=True):
    """How long the first token took."""

    case: str
    p50_ms: float
    p99_ms: float
    prompt_tokens: int
    cached_tokens: int
    """Of all prompts together, as the server tells."""

    @classmethod
    def of(cls, case: str, answers: Sequence[Answer]) -> "First":
        waits = [answer.ttft_s * 1000 for answer in answers]
        prompt = sum(answer.usage.prompt_tokens for answer in answers)
        return cls(case, quantile(waits, 0.5), quantile(waits, 0.99), prompt, sum(map(_cached, answers)))


class Visit(Struct, frozen=True):
    """One server in one round."""

    server: str
    loads: list[Load]
    firsts: list[First]
    peak_mib: float
    start_s: float


def load_of(answers: Sequence[Answer], streams: int | None = None) -> Load:
    """Of answers that were given all at once, or by so many streams one after the other."""
    streams = streams or len(answers)
    began = sorted(answer.times[0] for answer in answers)[streams - 1]
    ended = min(answer.times[-1] for answer in answers[-streams:])
    together = sum(answer.tokens_between(began, ended) for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    whole = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    waits = [answer.ttft_s * 1000 for answer in answers]
    return Load(
        streams=streams,
        tokens=tokens,
        tokens_per_s=tokens / whole,
        # Answers that were computed one after the other were never all under way.
        steady_per_s=together / (ended - began) if ended > began else 0.0,
        first_p50_ms=quantile(waits, 0.5),
        first_p99_ms=quantile(waits, 0.99),
    )


def _cached(answer: Answer) -> int:
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0


def quantile(values: Iterable[float], share: float) -> float:
    """The nearest rank: `quantile([1, 2, 3, 4], 0.5)` is 2."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]
