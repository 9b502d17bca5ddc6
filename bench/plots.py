"""The tables as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.tables import OUT

Bar: TypeAlias = tuple[str, int, float]
"""Server, streams, height."""
MOST_GROUPS = 12


def stream(bars: Sequence[Bar], folder: str | None) -> None:
    """CPU per token, one group of bars for each number of streams."""
    _bars(bars, "CPU µs per token (less is better)", "stream", folder)


def serve(bars: Sequence[Bar], folder: str | None) -> None:
    _bars(bars, "tokens per second (more is better)", "serve", folder)


def first_token(bars: Sequence[tuple[str, str, float]], folder: str | None) -> None:
    _bars(bars, "ms to the first token (less is better)", "first-token", folder)


def parse(bars: Sequence[tuple[str, str, float]], folder: str | None) -> None:
    """µs per token for the formats that all can read."""
    parsers = {bar[0] for bar in bars}
    able = {group: {bar[0] for bar in bars if bar[1] == group and bar[2] > 0} for _, group, _ in bars}
    shown = [bar for bar in bars if able[bar[1]] == parsers][: MOST_GROUPS * len(parsers)]
    if shown:
        _bars(shown, "µs per token (less is better)", "parse", folder, wide=True)


def _bars(
    bars: Sequence[tuple[str, Any, float]], label: str, name: str, folder: str | None, *, wide: bool = False
) -> None:
    # Imported when needed: the figures themselves must not depend on what draws them.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{name}: no picture is drawn; that takes matplotlib: pip install 'dragoman[bench]'")
        return

    servers = list(dict.fromkeys(bar[0] for bar in bars))
    groups = list(dict.fromkeys(bar[1] for bar in bars))
    heights = {bar[:2]: bar[2] for bar in bars}
    figure = Figure(figsize=(13.0, 4.2) if wide else (7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(servers)
    for number, server in enumerate(servers):
        left = [index + (number - (len(servers) - 1) / 2) * width for index in range(len(groups))]
        drawn = axes.bar(left, [heights[server, group] for group in groups], width * 0.92, label=server)
        axes.bar_label(drawn, fmt=_figure, fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), [_name(group) for group in groups])
    axes.set_ylabel(label)
    if wide:
        # A hundredfold difference would leave nothing to see of the smaller bars.
        axes.set_yscale("log")
        axes.tick_params(axis="x", rotation=30)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    target = Path(folder) if folder else OUT
    target.mkdir(parents=True, exist_ok=True)
    figure.savefig(target / f"{name}.png", dpi=160)


def _figure(height: float) -> str:
    return f"{height:,.0f}" if height >= 100 else f"{height:.1f}"


def _name(group: int | str) -> str:
    if isinstance(group, str):
        return group
    return f"{group} stream" if group == 1 else f"{group} streams"
