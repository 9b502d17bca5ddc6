"""`make soak`: people, not load.

A real `dragoman serve` with the default model, and seeded people at real sockets who do what people do, in
the order in which they do it: they ask, ask again, change their minds, stop in the middle, leave and come
back. Meanwhile an administrator changes adapters and models and restarts the server. Whatever a person would
not put up with fails the run: `python -m tests.soak --help`.
"""
