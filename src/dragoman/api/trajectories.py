"""What a model saw and sampled, turn by turn, as sequences to train on.

Turns whose prompt goes on from the ids of the turn before are one sequence. Where a prompt was written anew,
because a template or a client has changed what was said, another sequence begins: nothing is trained on that
was not so.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from dragoman.api.read import Reader
from dragoman.errors import NotFound
from dragoman.limits import check_count
from dragoman.store import Record
from dragoman.types import Traced

MOST_REWARDS = 64
"""Names of one answer, however many requests they came in."""
# Sums and means of rewards are to be numbers too.
Reward = Annotated[float, Meta(ge=-1e30, le=1e30)]
Rewards = Annotated[dict[Annotated[str, Meta(max_length=64)], Reward], Meta(max_length=MOST_REWARDS)]
_encode = msgspec.json.Encoder().encode


class Trace(Struct, kw_only=True):
    """The turns of one answer, as they are stored."""

    turns: list[Traced]
    rewards: dict[str, float] = field(default_factory=dict)


class SetRewards(Struct, forbid_unknown_fields=True):
    rewards: Rewards | None = None
    reward: Reward | None = None
    """The same as `rewards: {"reward": ...}`."""

    @property
    def all(self) -> dict[str, float]:
        return {**(self.rewards or {}), **({} if self.reward is None else {"reward": self.reward})}


class Segment(Struct):
    """One sequence."""

    ids: list[int]
    mask: list[int]
    """1 where the id was sampled."""
    logprobs: list[float | None]
    """Null where the id was not sampled, or the engine was not asked."""
    weight_versions: list[str | None]
    """Of the model, for each turn."""
    answers: list[str]
    """The ids of the answers, for each turn."""
    finish: str | None = None
    """How the last turn ended."""
    choice: int = 0
    """Of the last answer."""


_READER = Reader.of(SetRewards)
_trace = msgspec.json.Decoder(Trace).decode


def read_rewards(body: bytes) -> dict[str, float]:
    given: SetRewards = _READER.read(body)
    return given.all


def record(
    id_: str,
    owner: str,
    created_at: float,
    model: str,
    turns: Sequence[Traced],
    *,
    previous: str | None = None,
    conversation: str | None = None,
) -> Record:
    return Record(
        kind="trajectory",
        id=id_,
        owner=owner,
        created_at=created_at,
        status="completed",
        model=model,
        metadata={"conversation": conversation} if conversation else {},
        previous=previous or next((turn.after for turn in turns if turn.after), None),
        body=_encode(Trace(turns=list(turns))),
    )


def trace_of(record: Record) -> Trace:
    return _trace(record.body)


def rewarded(record: Record, rewards: dict[str, float]) -> bytes:
    """The body with these rewards added."""
    trace = trace_of(record)
    trace.rewards |= rewards
    check_count(len(trace.rewards), MOST_REWARDS, "rewards", "names of rewards")
    return _encode(trace)


def segments(turns: Iterable[Traced]) -> list[Segment]:
    made: list[Segment] = []
    for turn in turns:
        if not made or tuple(made[-1].ids) != turn.prompt[: len(made[-1].ids)]:
            made.append(Segment([], [], [], [], []))
        _extend(made[-1], turn)
    return made


def _extend(segment: Segment, turn: Traced) -> None:
    shown = turn.prompt[len(segment.ids) :]
    segment.ids += [*shown, *turn.ids]
    segment.mask += [0] * len(shown) + [1] * len(turn.ids)
    sampled: Sequence[float | None] = turn.logprobs or [None] * len(turn.ids)
    segment.logprobs += [*[None] * len(shown), *sampled]
    segment.weight_versions.append(turn.weight_version)
    segment.answers.append(turn.source)
    segment.finish, segment.choice = turn.finish, turn.choice


def chosen(traces: Sequence[Trace], choice: int) -> list[Traced]:
    """The turns that lead up to one choice of the last answer: of earlier ones, what was gone on from."""
    turns: list[Traced] = []
    for trace in reversed(traces):
        following = turns[0].prompt if turns else None
        taken = choice if following is None else _gone_on_from(trace, following)
        turns = [turn for turn in trace.turns if turn.choice == taken] + turns
    return turns


def _gone_on_from(trace: Trace, prompt: tuple[int, ...]) -> int:
    kept = (turn.choice for turn in trace.turns if turn.all == prompt[: len(turn.all)])
    return next(kept, 0)


def sequences(records: Sequence[Record]) -> list[Segment]:
    """Those of all choices of the last answer. Records come in the order of their making."""
    traces = [trace_of(one) for one in records]
    choices = sorted({turn.choice for turn in traces[-1].turns})
    return [segment for choice in choices for segment in segments(chosen(traces, choice))]


def rewards(records: Sequence[Record]) -> dict[str, float]:
    """Of the last answer, and of those before it that it does not have itself."""
    return {name: value for one in records for name, value in trace_of(one).rewards.items()}


def shown(id_: str, records: Sequence[Record]) -> dict[str, Any]:
    """The trajectory up to an answer, or of a conversation."""
    return {
        "id": id_,
        "object": "trajectory",
        "model": records[-1].model,
        "segments": sequences(records),
        "rewards": rewards(records),
    }


def unknown_trajectory(id_: str) -> NotFound:
    message = (
        f"There is no trajectory '{id_[:128]}': send store and return_token_ids with a request, or start the"
        " server with --trajectories."
    )
    return NotFound(message, code="not_found")
