"""Runs that are too long for every change: `make torture`, or some of them by `python -m tests.torture NAME`.

Each module here that has a `run(scale, seed)` is a part of the page. A small one of each is in `make test`.
"""
