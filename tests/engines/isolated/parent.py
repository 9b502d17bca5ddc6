"""A parent to be killed: it prints the number of its child and waits."""

import sys

from tests.engines.isolated.program import opened

if __name__ == "__main__":
    print(opened().pid, flush=True)
    sys.stdin.read()
