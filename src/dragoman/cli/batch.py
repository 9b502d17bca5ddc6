"""Answer a file of requests, in this process or on a server; an interrupted run resumes."""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dragoman.cli.address import key_of
from dragoman.cli.exits import FAILED, CommandError, load_interruptibly, stopped_by_signals
from dragoman.cli.parser import add_connection, add_settings, read_settings
from dragoman.cli.terminal import Progress

if TYPE_CHECKING:
    import httpx

    from dragoman.api.batches import BatchLineCodec
    from dragoman.batches.line_processor import LineProcessor
    from dragoman.http.app import App
    from dragoman.limits import Limits

SUMMARY = "answer a file of requests"
EXAMPLE = """\
examples:
  dragoman batch run questions.jsonl                             with the default model, in this process
  dragoman batch run questions.jsonl --model model.gguf -o a.jsonl
  dragoman batch run questions.jsonl --url http://127.0.0.1:8000  on a server, in the background

Each line is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}, as OpenAI's batches have
it. Results go to questions.output.jsonl, failures to questions.errors.jsonl. After an interruption, run the
same command again: finished lines are not repeated. See docs/files.md.
"""
GROUPS = ("model", "dialect", "engine", "requests", "upstreams", "logging", "limits")
BAR = 24
POLL_INTERVAL_S = 0.2
ASK_S = 1.0
OVER = ("completed", "failed", "expired", "cancelled")
BEGINNING = b'{"id":"batch_req_'
"""The first bytes of every line that a batch writes."""
MOST_TOLD = 20


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dragoman batch run FILE [flags]"
    parser.add_argument("action", choices=("run",), help="action")
    parser.add_argument("file", metavar="FILE", type=Path, help="file of requests, one JSON object per line")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="[default: FILE.output.jsonl]")
    parser.add_argument("--errors", metavar="FILE", type=Path, help="[default: FILE.errors.jsonl]")
    add_connection(parser)
    add_settings(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    source: Path = args.file.expanduser()
    if not source.is_file():
        raise CommandError(f"There is no file {source}.")
    stem = source.with_suffix("") if source.suffix == ".jsonl" else source
    good = args.output or stem.with_name(f"{stem.name}.output.jsonl")
    bad = args.errors or stem.with_name(f"{stem.name}.errors.jsonl")
    files = source, good.expanduser(), bad.expanduser()
    try:
        with stopped_by_signals(last=args.owns_process):
            return _run_there(args, *files) if args.url else _run_here(args, *files)
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to resume.", file=sys.stderr)
        raise


class ProgressBar:
    """Progress bar on a terminal line that is overwritten."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._total = total
        self._began, self._before = time.monotonic(), done
        self._progress = Progress()

    def show(self, done: int, failed: int) -> None:
        self._progress.say(bar(done, self._total, failed, self._rate(done)))

    def _rate(self, done: int) -> float:
        return (done - self._before) / max(time.monotonic() - self._began, 0.001)

    def clear(self) -> None:
        self._progress.clear()


def bar(done: int, total: int, failed: int, rate: float) -> str:
    """Format a bar: `[######..................] 25 of 100 · 1 failed · 5.0/s · 0:15 left`"""
    full = BAR * done // max(total, 1)
    left = f" · {_minutes((total - done) / rate)} left" if rate > 0 else ""
    wrong = f" · {failed:,} failed" if failed else ""
    return f"[{'#' * full}{'.' * (BAR - full)}] {done:,} of {total:,}{wrong} · {rate:.1f}/s{left}"


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:0{2 if hours else 1}d}:{whole % 60:02d}"


def _summary(done: int, failed: int, good: Path, bad: Path) -> str:
    wrong = f", {failed:,} failed: {bad}" if failed else ""
    return f"{done:,} answered: {good}{wrong}"


# With an engine in this process.


def _run_here(args: argparse.Namespace, source: Path, good: Path, bad: Path) -> int:
    from dragoman import logs
    from dragoman.cli.engine import make_served_engine
    from dragoman.http.app import App

    for path in (good, bad):
        _check_own(path)
    settings = read_settings(args, store="memory")
    level = settings.log_level if settings.log_level != "info" else "warning"
    logs.setup(level, settings.log_json)
    own = settings.engine == "local"
    engine = load_interruptibly(lambda: make_served_engine(settings)) if own else make_served_engine(settings)
    counts = asyncio.run(_answer_all(App(engine, settings), source, good, bad))
    print(_summary(counts.completed, counts.failed, good, bad))
    return 0


def _check_own(path: Path) -> None:
    """Check that an existing output file was written by a batch, because a run appends to it."""
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(BEGINNING)) != BEGINNING:
                hint = "Name another file with -o and --errors."
                raise CommandError(f"{path} exists and was not written by a batch.", hint)


async def _answer_all(app: "App", source: Path, good: Path, bad: Path) -> Any:
    from dragoman.api.batches import OpenAILineCodec
    from dragoman.batches.line_processor import LineProcessor

    host = app.host
    await host.start()
    try:
        spelling = OpenAILineCodec()
        total = _check_all(source, spelling, host.limits, host.pool.check)
        run = LineProcessor(
            *(source, good, bad, spelling),
            lambda asked: host.answer_line("", asked),
            host.most_lines,
            host.files.run,
        )
        await _with_bar(run, total, run.run)
        return run.counts
    finally:
        await host.stop()


def _check_all(
    source: Path, spelling: "BatchLineCodec", limits: "Limits", check_model: Callable[[str], None]
) -> int:
    """Check all lines and return their number; raises if one is not a valid request."""
    from dragoman.batches.line_processor import SeenIds, lines_of
    from dragoman.store.records import BatchLineError

    seen, faults, total = SeenIds(), list[str](), 0
    with source.open("rb") as file:
        for total, line in enumerate(lines_of(file), 1):
            item = spelling.check(line, None, limits, check_model)
            if isinstance(item, BatchLineError):
                faults.append(f"line {total}: {item.message}")
            elif seen.has_seen(item.custom_id):
                faults.append(f"line {total}: another line has the same custom_id.")
            if len(faults) >= MOST_TOLD:
                break
    if faults:
        raise CommandError(f"{source} has invalid lines:\n  " + "\n  ".join(faults))
    return total


async def _with_bar(run: "LineProcessor", total: int, work: Callable[[], Awaitable[None]]) -> None:
    """Show the progress of the run until it ends."""
    working = asyncio.ensure_future(work())
    shown = ProgressBar(total)
    began = False
    try:
        while not working.done():
            await asyncio.wait({working}, timeout=POLL_INTERVAL_S)
            done = run.counts.completed + run.counts.failed
            if not began:
                # Lines finished by an earlier run do not count for this run's speed.
                shown, began = ProgressBar(total, done), True
            shown.show(done, run.counts.failed)
        await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        shown.clear()


# On a server.


def _run_there(args: argparse.Namespace, source: Path, good: Path, bad: Path) -> int:
    import httpx

    from dragoman.client.base import JsonExchange
    from dragoman.client.config import Timeouts, make_config

    setup = make_config(args.url, key_of(args.api_key), Timeouts(), 0, None)
    with httpx.Client(**setup.options()) as client:

        def ask(method: str, path: str, **more: Any) -> Any:
            exchange = JsonExchange(setup, method, path)
            try:
                return exchange.read(client.request(method, path, **more)).body
            except httpx.HTTPError as error:
                raise exchange.make_error(error) from error

        note = source.with_name(f"{source.name}.batch")
        id_ = _noted(note, setup.url) or _begin(ask, source)
        note.write_bytes(msgspec.json.encode({"url": setup.url, "id": id_}))
        batch = _wait(ask, id_)
        for target, file in ((good, batch["output_file_id"]), (bad, batch["error_file_id"])):
            if file is not None:
                _fetch(client, file, target)
        note.unlink()
    counts = batch["request_counts"]
    if batch["status"] != "completed":
        errors = (batch["errors"] or {}).get("data", [])[:MOST_TOLD]
        text = "".join(f"\n  line {one['line']}: {one['message']}" for one in errors)
        raise CommandError(f"The batch {id_} is {batch['status']}.{text}")
    print(_summary(counts["completed"], counts["failed"], good, bad))
    return 0


def _noted(note: Path, url: str) -> str | None:
    """Return the id of the batch that an earlier run started for this file on this server."""
    try:
        fields: dict[str, str] = msgspec.json.decode(note.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return None
    return fields.get("id") if fields.get("url") == url else None


def _begin(ask: Callable[..., Any], source: Path) -> str:
    endpoints = {*_endpoints(source)}
    if len(endpoints) != 1:
        raise CommandError("The lines have more than one `url`; a batch on a server takes one.")
    with source.open("rb") as file:
        uploaded = ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": (source.name, file)})
    asked = {"input_file_id": uploaded["id"], "endpoint": endpoints.pop(), "completion_window": "24h"}
    return str(ask("POST", "/v1/batches", json=asked)["id"])


def _endpoints(source: Path) -> Iterator[str]:
    from dragoman.batches.line_processor import lines_of

    with source.open("rb") as file:
        for number, line in enumerate(lines_of(file), 1):
            try:
                yield msgspec.json.decode(line, type=_Url).url
            except msgspec.DecodeError:
                raise CommandError(f"Line {number} of {source} is not a valid request.") from None


class _Url(msgspec.Struct):
    url: str


def _wait(ask: Callable[..., Any], id_: str) -> dict[str, Any]:
    shown: ProgressBar | None = None
    try:
        while True:
            batch: dict[str, Any] = ask("GET", f"/v1/batches/{id_}")
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            if batch["status"] in OVER:
                return batch
            shown = shown or ProgressBar(counts["total"], done) if counts["total"] else None
            if shown is not None:
                shown.show(done, counts["failed"])
            time.sleep(ASK_S)
    finally:
        if shown is not None:
            shown.clear()


def _fetch(client: "httpx.Client", file: str, path: Path) -> None:
    """Download a file; it gets its final name once it is complete."""
    part = path.with_name(f"{path.name}.part")
    with client.stream("GET", f"/v1/files/{file}/content") as response, part.open("wb") as written:
        if response.status_code != 200:
            raise CommandError(f"The server does not return the file {file}.", exit_code=FAILED)
        for piece in response.iter_bytes():
            written.write(piece)
    part.replace(path)
