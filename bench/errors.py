class BenchError(Exception):
    """A measurement that is worth nothing, and why."""
