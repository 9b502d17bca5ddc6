"""Export stored answers as training data: one sequence of ids per line, with a mask of the sampled ones."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dragoman.cli.exits import USAGE, CommandError
from dragoman.cli.parser import add_settings, read_settings
from dragoman.cli.store import EVERY, STDOUT, open_named, with_store
from dragoman.cli.terminal import Progress

if TYPE_CHECKING:
    from dragoman.store import Store

SUMMARY = "export stored answers as training data"
EXAMPLE = """\
examples:
  dragoman serve --trajectories                  store the ids of every answer
  dragoman export -o run.jsonl                   sequences with masks, log probabilities and rewards
  dragoman export -o run.parquet                 the same for pyarrow, pandas, datasets

A sequence has all ids that the model read and sampled. docs/trajectories.md describes the format.
"""
LONGEST = 4096
ROWS = 1000
"""Rows per row group of a Parquet file."""


class TrainingLine(msgspec.Struct):
    """The fields read from a line of the store."""

    kind: str = ""
    id: str = ""
    owner: str = ""
    previous: str | None = None


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=STDOUT,
        help="output file, .jsonl or .parquet, instead of standard output",
    )
    parser.add_argument("--format", choices=("jsonl", "parquet"), help="[default: by the file's name]")
    add_settings(parser, ("store",))


def run(args: argparse.Namespace) -> int:
    form = args.format or ("parquet" if args.output.endswith(".parquet") else "jsonl")
    if form == "parquet" and args.output == STDOUT:
        raise CommandError("Parquet needs a file: -o FILE.", exit_code=USAGE)
    settings, file = read_settings(args), Path(args.output).expanduser()

    async def write(store: "Store") -> int:
        if form == "parquet":
            return await to_parquet(sequences(store), file)
        return await to_lines(sequences(store), args.output)

    count = asyncio.run(with_store(settings, write))
    print(f"{count} sequences", file=sys.stderr)
    return 0


async def sequences(store: "Store") -> AsyncIterator[dict[str, Any]]:
    """Yield every sequence once. An answer that another one continues is part of that one's sequence."""
    from dragoman.api.training import rewards
    from dragoman.api.training import sequences as of

    seen: set[tuple[str, ...]] = set()
    for owner, id_ in await _last_answers(store):
        records = await store.lineage(owner, id_, LONGEST)
        for segment in of(records):
            key = (*segment.answers, str(segment.choice))
            if key not in seen:
                seen.add(key)
                facts = {"id": id_, "model": records[-1].model, "rewards": rewards(records)}
                yield {**facts, **msgspec.to_builtins(segment)}


async def _last_answers(store: "Store") -> list[tuple[str, str]]:
    """Return the answers that no other answer continues."""
    decode = msgspec.json.Decoder(TrainingLine).decode
    mapping: dict[tuple[str, str], None] = {}
    continued: set[tuple[str, str | None]] = set()
    async for raw in store.export():
        line = decode(raw)
        if line.kind == "trajectory":
            mapping[line.owner, line.id] = None
            continued.add((line.owner, line.previous))
    return [key for key in mapping if key not in continued]


async def to_lines(rows: AsyncIterator[dict[str, Any]], output: str) -> int:
    encode = msgspec.json.Encoder().encode
    file = sys.stdout.buffer if output == STDOUT else open_named(output)
    progress, count = Progress(), 0
    async for row in rows:
        file.write(encode(row) + b"\n")
        count += 1
        if count % EVERY == 0:
            progress.say(f"exported {count}")
    file.flush()
    progress.clear()
    return count


async def to_parquet(rows: AsyncIterator[dict[str, Any]], file: Path) -> int:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise CommandError(
            "Parquet needs pyarrow: pip install 'dragoman[parquet]'.", exit_code=USAGE
        ) from error
    schema = arrow.schema(
        {
            "id": arrow.string(),
            "model": arrow.string(),
            "rewards": arrow.map_(arrow.string(), arrow.float64()),
            "ids": arrow.list_(arrow.int32()),
            "mask": arrow.list_(arrow.int8()),
            "logprobs": arrow.list_(arrow.float32()),
            "weight_versions": arrow.list_(arrow.string()),
            "answers": arrow.list_(arrow.string()),
            "histories": arrow.list_(arrow.string()),
            "split": arrow.string(),
            "finish": arrow.string(),
            "choice": arrow.int32(),
        }
    )
    count, group = 0, []
    with parquet.ParquetWriter(file, schema) as writer:
        async for row in rows:
            group.append({**row, "rewards": list(row["rewards"].items())})
            count += 1
            if len(group) == ROWS:
                writer.write_table(arrow.Table.from_pylist(group, schema))
                group = []
        if group:
            writer.write_table(arrow.Table.from_pylist(group, schema))
    return count
