"""The engine's time is shared between owners first, and only then between kinds of work."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.local.engine_thread import EmbeddingTask, EngineThread
from dragoman.engines.local.scheduler import Scheduler
from dragoman.engines.local.sequence import ScheduledTokens, SequenceGroup, make_group
from dragoman.types import Step
from tests.engines.local.scripted import END, vector_of
from tests.engines.local.support import FakeRunner, job

PASS_S, ROW_S, TEXT_S = 4.0, 1.0, 16.0
CHUNK = 8
LONG = list(range(1, 41))
LOOP = asyncio.new_event_loop()


class Shop:
    """A worker that is driven by hand, over a runner for which every row and every text takes its time."""

    def __init__(self, patch: pytest.MonkeyPatch, slots: int = 4) -> None:
        self.now = 0.0
        self.runner = FakeRunner(slots=slots, context=128)
        scheduler = Scheduler(self.runner, batch=32, chunk=CHUNK)
        self.worker = EngineThread(self.runner, scheduler)
        self.said: list[tuple[SequenceGroup, Step]] = []
        self.had: list[tuple[str, str, float]] = []
        """Owner, kind of work and seconds."""
        for module in ("scheduler", "engine_thread"):
            patch.setattr(f"dragoman.engines.local.{module}.time.perf_counter", lambda: self.now)
        patch.setattr(self.worker, "_start", lambda: None)
        patch.setattr(self.worker, "_deliver", self.said.extend)
        patch.setattr(self.runner, "embed", self._embed)
        step, account = self.runner.step, scheduler.account

        def timed(rows: Any) -> Any:
            self.now += PASS_S + ROW_S * len(rows)
            return step(rows)

        patch.setattr(self.runner, "step", timed)
        self._stepped, self._embedded = account.charge_step, account.charge_embedding
        patch.setattr(account, "charge_step", self._note_step)
        patch.setattr(account, "charge_embedding", self._note_embedding)

    def ask(self, owner: str, prompt: Sequence[int], count: int) -> SequenceGroup:
        asked = job(prompt, count, owner=owner)
        group = make_group(asked, lambda step: None, LOOP, self.runner, frozenset({END}))
        self.worker.submit(group)
        return group

    def embed(self, owner: str, texts: int) -> EmbeddingTask:
        embedding = EmbeddingTask([[n] for n in range(texts)], self.runner, LOOP, owner)
        self.worker.embed(embedding)
        return embedding

    def turn(self) -> None:
        self.worker._turn()

    def turns(self, most: int) -> None:
        """So many, if there is so much to do."""
        worker = self.worker
        while most and (worker._scheduler.busy or worker._embeddings or not worker._mail.empty()):
            self.turn()
            most -= 1

    def over(self, group: SequenceGroup) -> bool:
        return any(step.finish for one, step in self.said if one is group)

    def done(self, embedding: EmbeddingTask) -> bool:
        LOOP.call_soon(LOOP.stop)
        LOOP.run_forever()
        return embedding.future.done()

    def _embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        for prompt in prompts:
            self.now += TEXT_S
            yield vector_of(prompt)

    def _note_step(self, pieces: list[ScheduledTokens], seconds: float) -> None:
        rows = sum(piece.size for piece in pieces)
        for piece in pieces:
            kind = "read" if piece.input_token is None else "decode"
            self.had.append((piece.sequence.owner, kind, seconds * piece.size / rows))
        self._stepped(pieces, seconds)

    def _note_embedding(self, owner: str, seconds: float) -> None:
        self.had.append((owner, "embed", seconds))
        self._embedded(owner, seconds)


def times(had: list[tuple[str, str, float]]) -> Counter[tuple[str, str]]:
    mapping: Counter[tuple[str, str]] = Counter()
    for owner, kind, seconds in had:
        mapping[owner, kind] += seconds  # type: ignore[assignment]
    return mapping


PIECE_S = max(TEXT_S, PASS_S + ROW_S * (CHUNK + 8))
"""The longest that is computed in one go."""
ANSWERS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), max_size=8)


@given(ANSWERS, st.lists(st.integers(1, 30), max_size=3), st.integers(0, 5), st.integers(5, 20))
def test_what_one_owner_reads_and_embeds_takes_no_more_than_another_has_had(
    answers: list[tuple[int, int]], embeddings: list[int], before: int, count: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shop = Shop(patch)
        asked = [shop.ask("flood", [n, *LONG[:size]], most) for n, (size, most) in enumerate(answers)]
        tasks = [shop.embed("flood", texts) for texts in embeddings]
        shop.turns(before)
        drop = shop.ask("drop", [50], count)
        shop.turn()
        shop.had.clear()
        while not shop.over(drop):
            shop.turn()
        mapping = times(shop.had)
        put_off = mapping["flood", "read"] + mapping["flood", "embed"]
        assert put_off <= mapping["drop", "decode"] + mapping["drop", "read"] + 2 * PIECE_S
        shop.turns(1000)
        assert all(map(shop.over, asked))
        assert all(map(shop.done, tasks))


def test_a_small_embedding_does_not_wait_for_the_long_ones_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop(monkeypatch)
    long = [shop.embed("flood", 50) for _ in range(2)]
    shop.turn()
    small = shop.embed("drop", 2)
    shop.turns(5)
    assert shop.done(small)
    assert not shop.done(long[0])


def test_beside_the_answers_of_another_embeddings_have_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop(monkeypatch)
    shop.ask("drop", [1], 60)
    shop.embed("flood", 100)
    shop.turns(40)
    mapping = times(shop.had)
    assert 0.4 < mapping["flood", "embed"] / sum(mapping.values()) < 0.6


def test_of_one_owner_too_embeddings_have_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch)
    shop.ask("one", [1], 60)
    shop.embed("one", 100)
    shop.turns(40)
    mapping = times(shop.had)
    assert 0.4 < mapping["one", "embed"] / sum(mapping.values()) < 0.6


def test_two_owners_who_both_only_read_and_embed_come_to_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch)
    asked = [shop.ask(owner, [n, *LONG], 1) for owner in ("one", "other") for n in range(3)]
    tasks = [shop.embed(owner, 5) for owner in ("one", "other")]
    shop.turns(100)
    assert all(map(shop.over, asked))
    assert all(map(shop.done, tasks))


def test_who_embedded_alone_owes_no_more_than_the_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch)
    shop.embed("flood", 100)
    shop.turns(20)
    drop = shop.ask("drop", [1], 20)
    shop.had.clear()
    while not shop.over(drop):
        shop.turn()
    mapping = times(shop.had)
    assert 0.3 < mapping["flood", "embed"] / sum(mapping.values()) < 0.6


def test_when_one_has_left_the_other_begins_no_long_piece_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch)
    for n in range(3):
        shop.ask("flood", [n], 100)
    shop.embed("flood", 100)
    shop.turns(5)
    shop.had.clear()
    for number in range(8):
        drop = shop.ask("drop", [50 + number], 3)
        while not shop.over(drop):
            shop.turn()
    mapping = times(shop.had)
    assert mapping["flood", "embed"] <= mapping["drop", "decode"] + mapping["drop", "read"] + TEXT_S
