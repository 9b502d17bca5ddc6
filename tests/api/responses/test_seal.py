import pytest

from dragoman.responses.seal import PREFIX, Sealer

KEY = b"k" * 32


def test_a_seal_hides_the_text() -> None:
    sealed = Sealer(KEY).seal("hm, let me think", "me")
    assert sealed.startswith(PREFIX) and "think" not in sealed and sealed.isascii()


def test_the_same_text_is_sealed_differently_each_time() -> None:
    assert Sealer(KEY).seal("x", "me") != Sealer(KEY).seal("x", "me")


def test_a_seal_outlives_the_process() -> None:
    assert Sealer(KEY).open(Sealer(KEY).seal("x", "me"), "me") == "x"


def test_another_key_does_not_open_it() -> None:
    assert Sealer(b"l" * 32).open(Sealer(KEY).seal("x", "me"), "me") is None


def test_a_changed_seal_does_not_open() -> None:
    sealed = Sealer(KEY).seal("a longer text", "me")
    for at in range(len(sealed)):
        other = "A" if sealed[at] != "A" else "B"
        assert Sealer(KEY).open(sealed[:at] + other + sealed[at + 1 :], "me") is None
    assert Sealer(KEY).open(sealed + "\n", "me") is None


def test_a_short_key_is_no_key() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Sealer(b"short")
