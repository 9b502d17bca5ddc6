"""What the parsers cost, and whether they were right, as tables."""

from collections.abc import Iterator

from bench import ratios
from bench.parse_worker import OURS, SGLANG, VLLM, Outcome
from bench.ratios import Ratio
from bench.tables import Table, keep, ratio

PARSERS = (OURS, VLLM, SGLANG)
TARGETS = {"call": 5.0, "prose": 2.0, "reasoning": 2.0}
"""Microseconds a token may cost."""
EXPLAINED = (
    "`8x` is an answer of 8 times the length: what grows there is not linear. In brackets: the answer was",
    "wrong, so that the figure says little; ratios are with peers that were right.",
)


def tables(outcomes: list[Outcome], where: str, rounds: int) -> None:
    mapping = {(each.case, each.long, each.parser): each for each in outcomes}
    names = list(dict.fromkeys(each.case for each in outcomes))
    notes = [f"Median of {rounds} rounds. {where}.", *_verdict(mapping, names)]
    keep("parse", outcomes, [_costs(mapping, names, notes), _answers(mapping, names)])
    ratios.write("parse", compared(outcomes))


def compared(outcomes: list[Outcome]) -> Iterator[Ratio]:
    """Beside the faster one of the peers that were right."""
    cases: dict[str, list[Outcome]] = {}
    for each in outcomes:
        if each.rounds and (each.right or each.parser == OURS):
            cases.setdefault(f"{each.case}{', 8x' if each.long else ''}", []).append(each)
    for key, able in cases.items():
        peers = [each for each in able if each.parser != OURS]
        if ours := [each for each in able if each.parser == OURS and peers]:
            faster = min(peers, key=lambda each: each.us)
            yield Ratio(key, "µs/token", ours[0].rounds, faster.rounds, less_is_better=True)


def _costs(mapping: dict[tuple[str, bool, str], Outcome], names: list[str], notes: list[str]) -> Table:
    rows = []
    for name in names:
        cells = [_us(mapping.get((name, long, parser))) for parser in PARSERS for long in (False, True)]
        best = [_best_ratio(mapping, name, long) for long in (False, True)]
        rows.append((name, str(_tokens(mapping, name)), *cells, *best))
    return Table(
        "The price of reading a token, in µs of one core",
        ("format", "tokens", OURS, "8x", VLLM, "8x", SGLANG, "8x", "best peer / ours", "8x"),
        rows,
        [*notes, *EXPLAINED],
    )


def _answers(mapping: dict[tuple[str, bool, str], Outcome], names: list[str]) -> Table:
    rows = []
    for name in names:
        cells = []
        for parser in PARSERS:
            outcome = mapping.get((name, False, parser))
            cells += ["-", "-"] if outcome is None else _verdicts(outcome)
        rows.append((name, *cells))
    return Table(
        "Whether the answer was right, with 1 and with 16 tokens at a time",
        ("format", f"{OURS} 1", "16", f"{VLLM} 1", "16", f"{SGLANG} 1", "16"),
        rows,
        [
            "Right is the same name and the same arguments, or the same text. A format is laid out as",
            "dragoman writes it; a peer that wants it otherwise is wrong here. Errors are in parse.json.",
        ],
    )


def _verdicts(outcome: Outcome) -> list[str]:
    if outcome.error:
        return ["error", "error"]
    return ["yes" if right else "NO" for right in (outcome.right, outcome.right_at_16)]


def _verdict(mapping: dict[tuple[str, bool, str], Outcome], names: list[str]) -> list[str]:
    """How the figures stand to what was aimed at."""
    ours = [outcome for (_, long, parser), outcome in mapping.items() if parser == OURS and not long]
    slow = [each.case for each in ours if not each.error and each.us > TARGETS[each.mode]]
    behind = [
        f"{parser} on {name}{' (8x)' if long else ''}"
        for (name, long, parser), outcome in mapping.items()
        if parser != OURS and outcome.right and outcome.us < mapping[name, long, OURS].us
    ]
    return [
        f"Above the aim of 5 µs in a call and 2 µs in prose and reasoning: {', '.join(slow) or 'none'}.",
        f"Faster than dragoman: {', '.join(behind) or 'none'}.",
    ]


def _tokens(mapping: dict[tuple[str, bool, str], Outcome], name: str) -> int:
    return next(outcome.tokens for (case, long, _), outcome in mapping.items() if case == name and not long)


def _us(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    if outcome.error:
        return "error"
    return f"{outcome.us:.1f}" if outcome.right else f"({outcome.us:.1f})"


def _best_ratio(mapping: dict[tuple[str, bool, str], Outcome], name: str, long: bool) -> str:
    ours = mapping.get((name, long, OURS))
    peers = [mapping.get((name, long, parser)) for parser in PARSERS[1:]]
    able = [peer.us for peer in peers if peer is not None and peer.right]
    return ratio(min(able), ours.us) if able and ours is not None and not ours.error else "-"
