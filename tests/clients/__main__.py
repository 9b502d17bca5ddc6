"""`python -m tests.clients [NAME ...]`: real clients against a server, as one table of what works."""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from bench import machine
from bench.tables import OUT, Table, keep
from msgspec import Struct, field

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.clients import environments
from tests.clients.cases import SeenRequest
from tests.clients.model import model
from tests.clients.table import BY_NAME, CLIENTS, COLUMNS, Client

REFUSED = r'dragoman_requests_total\{route="([^"]*)",status="([45]\d\d)"\} ([\d.e+]+)'


class Outcome(Struct):
    """What became of one client."""

    client: Client
    seen: list[SeenRequest] = field(default_factory=list)
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        """A client that was not run has not passed."""
        return bool(self.seen) and all(one.failed is None for one in self.seen)


def main(arguments: list[str] | None = None) -> int:
    args = _read(arguments)
    chosen = [BY_NAME[name] for name in args.names] or list(CLIENTS)
    outcomes = [_try(client) for client in chosen]
    file = "clients_some" if args.names else "clients"
    keep(file, outcomes, [page(outcomes)])
    print(f"\nthe table is in {OUT / file}.md")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _try(client: Client) -> Outcome:
    print(f"{client.name} {client.version} ...", flush=True)
    try:
        environments.install(client)
    except environments.NotInstalled as error:
        print(f"  NOT RUN, for it could not be installed: {error}", flush=True)
        return Outcome(client, not_run=str(error))
    with (
        background(model(), Settings(port=0, store="memory")) as url,
        tempfile.TemporaryDirectory() as home,
    ):
        seen = [*_seen(client, f"{url}/v1", Path(home)), *find_refusals(client, url)]
    for api, what, failed in seen:
        if failed is not None:
            print(f"  {api}, {what} FAILED: {failed}", flush=True)
    return Outcome(client, seen)


def _seen(client: Client, url: str, home: Path) -> list[SeenRequest]:
    """What the program said of itself, and that it came to its end, if it did not."""
    try:
        done = environments.run(client, url, home)
    except subprocess.TimeoutExpired as error:
        # Whatever it said before that, which is bytes here.
        return [*read_cases(error.stdout or b""), SeenRequest("program", "comes to its end", str(error))]
    cases = read_cases(done.stdout)
    if done.returncode or not cases:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        cases.append(SeenRequest("program", "comes to its end", why))
    return cases


def read_cases(said: str | bytes) -> list[SeenRequest]:
    """Of what a program printed, the lines that tell of its cases."""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    lines = [line for line in text.splitlines() if line.startswith('{"api"') and line.endswith("}")]
    seen = [msgspec.json.decode(line, type=dict[str, str | None]) for line in lines]
    return [SeenRequest(**one) for one in seen]  # type: ignore[arg-type]


def find_refusals(client: Client, url: str) -> list[SeenRequest]:
    """What the server refused. Some clients then try another way, and nobody sees that the first was shut."""
    refused = re.findall(REFUSED, httpx.get(f"{url}/metrics").text)
    if sum(int(float(times)) for *_, times in refused) == client.refusals:
        return []
    text = ", ".join(f"{route} {status} ({float(times):.0f} times)" for route, status, times in refused)
    return [SeenRequest("server", "refuses what it should", f"{text or 'nothing'} was refused")]


def page(outcomes: Sequence[Outcome]) -> Table:
    rows = [row for outcome in outcomes for row in _rows(outcome)]
    passed = sum(outcome.passed for outcome in outcomes)
    notes = [f"{machine.describe()}; a scripted model behind a template that wants a user's message.", ""]
    for outcome in outcomes:
        if outcome.not_run is not None:
            notes.append(f"- {outcome.client.name} was NOT RUN: {outcome.not_run}")
        notes += [
            f"- {outcome.client.name}, {one.api}, {one.what}: {one.failed}"
            for one in outcome.seen
            if one.failed is not None
        ]
    head = ("client", "version", "API", *COLUMNS, "more")
    return Table(f"{passed} of {len(outcomes)} clients work", head, rows, notes)


def _rows(outcome: Outcome) -> list[list[str]]:
    """One for each API, or one that says that there is nothing to say."""
    name, version = outcome.client.name, outcome.client.version
    if outcome.not_run is not None:
        return [[name, version, "-", *("NOT RUN" for _ in COLUMNS), "NOT RUN"]]
    apis = dict.fromkeys(one.api for one in outcome.seen)
    return [[name, version, api, *_cells([one for one in outcome.seen if one.api == api])] for api in apis]


def _cells(seen: Sequence[SeenRequest]) -> list[str]:
    fields = {one.what: "works" if one.failed is None else "FAILS" for one in seen}
    others = [word for what, word in fields.items() if what not in COLUMNS]
    more = f"{others.count('works')} of {len(others)}" if others else "-"
    return [*(fields.get(column, "-") for column in COLUMNS), more]


def _read(arguments: list[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {client.name:<22} {client.version}" for client in CLIENTS)
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"clients:\n{listed}",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="[default: all]")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(BY_NAME):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
