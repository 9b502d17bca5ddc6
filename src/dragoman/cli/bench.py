"""Benchmark any OpenAI-compatible server: tokens per second and latencies at several loads."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from dragoman.cli.exits import FAILED, USAGE, CommandError
from dragoman.cli.parser import add_connection, positive
from dragoman.cli.terminal import Progress, table
from dragoman.logs import Colorizer

if TYPE_CHECKING:
    from dragoman.cli.load import LoadRequest, LoadResult

SUMMARY = "benchmark a server under load"
EXAMPLE = """\
example:
  dragoman bench --url http://127.0.0.1:8000 --streams 1,8,32 --tokens 128 --shared-prefix 24

Prompts are random words, about one token each. Answers have their full length on servers that support
`ignore_eos`; on others they may end early, which the tokens column shows.
"""
HEAD = ("streams", "tok/s", "first p50", "first p99", "between p50", "tokens", "prompt", "cached", "errors")


def add(parser: argparse.ArgumentParser) -> None:
    add_connection(parser, url="http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="model name [default: the server's first]")
    parser.add_argument(
        "--streams",
        metavar="N,N",
        default="1,8,32",
        help="concurrent streams [default: 1,8,32]",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=positive, default=128, help="tokens per answer [default: 128]"
    )
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=positive, default=32, help="words per prompt [default: 32]"
    )
    parser.add_argument(
        "--shared-prefix",
        metavar="N",
        type=int,
        default=0,
        help="words that all prompts share at the start [default: 0]",
    )
    parser.add_argument(
        "--rounds", metavar="N", type=positive, default=1, help="requests per stream [default: 1]"
    )
    parser.add_argument(
        "--api", choices=("chat", "completions"), default="chat", help="API to use [default: chat]"
    )
    parser.add_argument("--extra", metavar="JSON", default="{}", help="further fields of every request body")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=600.0,
        help="timeout of a request in seconds [default: 600]",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    levels, extra = _levels(args.streams), _extra(args.extra)
    results = _loop_runner()(_measure(args, levels, extra))
    if args.json:
        print(msgspec.json.encode(results).decode())
    else:
        print(table(HEAD, map(_row, results), Colorizer(sys.stdout)))
    paint = Colorizer(sys.stderr)
    if not all(result.counted for result in results):
        print(
            f"{paint('yellow', 'note:')} the server reports no usage: tokens are counted as events with text",
            file=sys.stderr,
        )
    for result in results:
        if result.first_error:
            print(f"{paint('red', 'error:')} {result.streams} streams: {result.first_error}", file=sys.stderr)
    return FAILED if any(result.errors for result in results) else 0


def _loop_runner() -> "Callable[[Coroutine[Any, Any, list[LoadResult]]], list[LoadResult]]":
    """Run with uvloop, if installed: it halves the CPU time that this client takes from the server."""
    with suppress(ImportError):
        import uvloop

        return uvloop.run
    return asyncio.run


async def _measure(args: argparse.Namespace, levels: list[int], extra: dict[str, Any]) -> "list[LoadResult]":
    from dragoman.cli.address import first_model, key_of
    from dragoman.cli.load import LoadRequest, fit
    from dragoman.client import Client

    key = key_of(args.api_key)
    with Client(args.url, key) as client:
        model = args.model or str(first_model(client)["id"])
    ask = LoadRequest(
        url=args.url,
        model=model,
        tokens=args.tokens,
        prompt_tokens=args.prompt_tokens,
        shared_prefix=args.shared_prefix,
        api=args.api,
        extra=extra,
        key=key,
        limit_s=args.timeout,
    )
    ask = await fit(ask)
    return [await _watch(ask, level, args.rounds) for level in levels]


async def _watch(ask: "LoadRequest", streams: int, rounds: int) -> "LoadResult":
    """Run one level of load with a progress line."""
    from dragoman.cli.load import LoadProgress
    from dragoman.cli.load import run as run_level

    tally, progress, total = LoadProgress(), Progress(), streams * rounds

    async def watch() -> None:
        while True:
            progress.say(f"{streams} streams  {tally.finished} of {total} requests  {tally.tokens} tokens")
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    try:
        return await run_level(ask, streams, rounds=rounds, tally=tally)
    finally:
        watching.cancel()
        progress.clear()


def _row(result: "LoadResult") -> tuple[str, ...]:
    return (
        str(result.streams),
        f"{result.tokens_per_s:.0f}",
        f"{result.ttft_p50_ms:.0f} ms",
        f"{result.ttft_p99_ms:.0f} ms",
        f"{result.itl_p50_ms:.1f} ms",
        str(result.tokens),
        str(result.prompt_tokens),
        str(result.cached_tokens),
        str(result.errors),
    )


def _levels(text: str) -> list[int]:
    """Parse `--streams`: `_levels("1,8")` is `[1, 8]`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CommandError("--streams takes numbers separated by commas, such as 1,8,32.", exit_code=USAGE)
    return [int(part) for part in parts]


def _extra(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CommandError('--extra takes a JSON object, such as {"top_k": 1}.', exit_code=USAGE) from error
