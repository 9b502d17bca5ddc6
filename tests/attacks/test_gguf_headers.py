"""Row 69: model files whose headers were tampered with; `tests.torture.gguf_headers` has more of them."""

from tests.torture.gguf_headers import run


def test_tampered_headers_are_refused_or_end_their_own_process() -> None:
    rows = run(0.005, seed=1)
    assert all(row.passed for row in rows), rows
