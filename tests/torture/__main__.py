"""`python -m tests.torture [NAME ...]`: every promise of reliability, tried, as one page."""

import argparse
import sys
import time
import traceback

from bench import machine
from bench.tables import OUT, keep

from tests.torture.page import Row, page
from tests.torture.parts import BY_NAME, PAGE, part


def main(arguments: list[str] | None = None) -> int:
    args = _read(arguments)
    began, rows = time.monotonic(), list[Row]()
    where = f"{machine.describe()}; scale {args.scale:g}, seed {args.seed}"
    print(where, flush=True)
    for name in args.names or PAGE:
        rows += _tried(name, args.scale, args.seed)
    minutes = (time.monotonic() - began) / 60
    file = "torture_of_some" if args.names else "torture"
    keep(file, rows, [page(rows, f"{where}; {minutes:.0f} minutes")])
    print(f"\nthe page is in {OUT / file}.md")
    return 0 if all(row.passed for row in rows) else 1


def _tried(name: str, scale: float, seed: int) -> list[Row]:
    """One part. Whatever happens to it, the others have their turn."""
    print(f"{name:<18} {(PAGE | BY_NAME)[name]} ...", flush=True)
    began = time.monotonic()
    try:
        rows = part(name)(scale, seed)
    except Exception as error:
        traceback.print_exc()
        rows = [Row(f"{name} comes to its end", type(error).__name__, "it does", False)]
    broken = sum(not row.passed for row in rows)
    print(f"{name:<18} {f'{broken} BROKEN' if broken else 'held'}, {time.monotonic() - began:.0f} s")
    return rows


def _read(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"on the page, an hour on two cores:\n{_listed(PAGE)}\n\nonly by name:\n{_listed(BY_NAME)}",
    )
    names, another = [*PAGE, *BY_NAME], time.time_ns() % 2**32
    parser.add_argument("names", nargs="*", metavar="NAME", help="[default: all that are on the page]")
    parser.add_argument("--scale", type=float, default=1.0, help="0.1 is a tenth of everything [default: 1]")
    parser.add_argument("--seed", type=int, default=another, help="[default: another each time]")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return args


def _listed(parts: dict[str, str]) -> str:
    return "\n".join(f"  {name:<18} {about}" for name, about in parts.items())


if __name__ == "__main__":
    sys.exit(main())
