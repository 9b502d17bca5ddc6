"""Requests for training a model: trajectories with rewards, and pausing the engine to change the weights.

A trajectory has the ids that the model was given and sampled, turn by turn, as sequences for training. A turn
whose prompt continues the ids of the turn before belongs to the same sequence. If a template or client
changed the earlier text, so that the prompt was encoded anew, a new sequence begins: training never uses ids
that the model did not see.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from dragoman.api.request_decoder import RequestDecoder
from dragoman.errors import NotFound, TrajectoryTooLarge
from dragoman.limits import check_count
from dragoman.store import Record
from dragoman.types import TurnRecord

MOST_IDS = 4 * 1024 * 1024
"""Maximum number of ids in one reply."""
MOST_REWARDS = 64
"""Maximum number of reward names of one answer, over all requests."""
# The bounds keep sums and means of rewards finite.
Reward = Annotated[float, Meta(ge=-1e30, le=1e30)]
Rewards = Annotated[dict[Annotated[str, Meta(max_length=64)], Reward], Meta(max_length=MOST_REWARDS)]
_encode = msgspec.json.Encoder().encode


class StoredTrajectory(Struct, kw_only=True):
    """The turns of one answer as they are stored."""

    turns: list[TurnRecord]
    rewards: dict[str, float] = field(default_factory=dict)


class StoredRewards(Struct):
    """The same, decoded without the turns."""

    rewards: dict[str, float] = field(default_factory=dict)


class SetRewardsRequest(Struct, forbid_unknown_fields=True):
    rewards: Rewards | None = None
    reward: Reward | None = None
    """Short for `rewards: {"reward": ...}`."""

    @property
    def all(self) -> dict[str, float]:
        return {**(self.rewards or {}), **({} if self.reward is None else {"reward": self.reward})}


class Segment(Struct):
    """One sequence of ids."""

    ids: list[int]
    mask: list[int]
    """1 for sampled ids, 0 for others."""
    logprobs: list[float | None]
    """Null for ids that were not sampled or have no log probability."""
    weight_versions: list[str | None]
    """The weight version of each turn."""
    answers: list[str]
    """The answer ids of each turn."""
    histories: list[str]
    """How each turn's prompt was to contain earlier answers."""
    finish: str | None = None
    """The finish reason of the last turn."""
    choice: int = 0
    """The choice index of the last answer."""
    split: str | None = None
    """Why the first prompt does not continue the answer before it, if there was one."""


_READER = RequestDecoder.for_type(SetRewardsRequest)
_trace = msgspec.json.Decoder(StoredTrajectory).decode
_rewards = msgspec.json.Decoder(StoredRewards).decode


def read_rewards(body: bytes) -> dict[str, float]:
    request: SetRewardsRequest = _READER.read(body)
    return request.all


def record(
    id_: str,
    owner: str,
    created_at: float,
    model: str,
    turns: Sequence[TurnRecord],
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
        previous=previous or next((turn.continues for turn in turns if turn.continues), None),
        body=_encode(StoredTrajectory(turns=list(turns))),
    )


def trace_of(record: Record) -> StoredTrajectory:
    return _trace(record.body)


def add_rewards(record: Record, rewards: dict[str, float]) -> bytes:
    """Return the record's body with these rewards added."""
    trace = trace_of(record)
    trace.rewards |= rewards
    check_count(len(trace.rewards), MOST_REWARDS, "rewards", "names of rewards")
    return _encode(trace)


def segments(turns: Iterable[TurnRecord]) -> list[Segment]:
    result: list[Segment] = []
    for turn in turns:
        if not result or tuple(result[-1].ids) != turn.prompt[: len(result[-1].ids)]:
            result.append(Segment([], [], [], [], [], [], split=turn.break_reason or None))
        _extend(result[-1], turn)
    return result


def _extend(segment: Segment, turn: TurnRecord) -> None:
    prompt = turn.prompt[len(segment.ids) :]
    segment.ids += [*prompt, *turn.ids]
    segment.mask += [0] * len(prompt) + [1] * len(turn.ids)
    sampled: Sequence[float | None] = turn.logprobs or [None] * len(turn.ids)
    segment.logprobs += [*[None] * len(prompt), *sampled]
    segment.weight_versions.append(turn.weight_version)
    segment.answers.append(turn.source)
    segment.histories.append(turn.history)
    segment.finish, segment.choice = turn.finish, turn.choice


def leading_to(prompt: tuple[int, ...], traces: Sequence[StoredTrajectory]) -> list[TurnRecord]:
    """Return the turns that a prompt continues: for each answer, the choice that the next one continued."""
    items: list[list[TurnRecord]] = []
    for trace in reversed(traces):
        taken = _goes_on_from(trace, prompt)
        items.append([turn for turn in trace.turns if turn.choice == taken])
        prompt = items[-1][0].prompt if items[-1] else prompt
    return [turn for turns in reversed(items) for turn in turns]


def _goes_on_from(trace: StoredTrajectory, prompt: tuple[int, ...]) -> int:
    """Return the choice that a prompt continues; the last id may be an end token that the template writes
    otherwise."""
    kept = (turn.choice for turn in trace.turns if turn.all_ids[:-1] == prompt[: turn.total_ids - 1])
    return next(kept, 0)


def sequences(records: Sequence[Record], most_ids: int | None = None) -> list[Segment]:
    """Return the sequences of all choices of the last answer; records are in the order of creation."""
    *before, last = [trace_of(one) for one in records]
    # All choices have one prompt, so the turns before it are searched once.
    known: dict[tuple[int, ...], list[TurnRecord]] = {}
    result: list[Segment] = []
    for choice in sorted({turn.choice for turn in last.turns}):
        turns = [turn for turn in last.turns if turn.choice == choice]
        prompt = turns[0].prompt
        if prompt not in known:
            known[prompt] = leading_to(prompt, before)
        result += segments([*known[prompt], *turns])
        if most_ids is not None and sum(len(segment.ids) for segment in result) > most_ids:
            raise TrajectoryTooLarge
    return result


def rewards(records: Sequence[Record]) -> dict[str, float]:
    """Return the rewards of the last answer, and of earlier answers for names that it lacks."""
    return {name: value for one in records for name, value in _rewards(one.body).rewards.items()}


def describe_trajectory(id_: str, records: Sequence[Record]) -> dict[str, Any]:
    """Describe the trajectory up to an answer, or of a conversation."""
    return {
        "id": id_,
        "object": "trajectory",
        "model": records[-1].model,
        "segments": [msgspec.structs.asdict(one) for one in sequences(records, MOST_IDS)],
        "rewards": rewards(records),
    }


def unknown_trajectory(id_: str) -> NotFound:
    message = (
        f"There is no trajectory '{id_[:128]}'; send store and return_token_ids with a request, or start the"
        " server with --trajectories."
    )
    return NotFound(message, code="not_found")


# Weights that change while they are served.


class PauseRequest(Struct, forbid_unknown_fields=True):
    pass


class ResumeRequest(Struct, forbid_unknown_fields=True):
    weight_version: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


_pause = RequestDecoder.for_type(PauseRequest)
_resume = RequestDecoder.for_type(ResumeRequest)


def read_pause(body: bytes) -> None:
    """Check the body, which may be empty."""
    _pause.read(body or b"{}")


def read_resume(body: bytes) -> ResumeRequest:
    request: ResumeRequest = _resume.read(body or b"{}")
    return request


def describe_engine(*, paused: bool, version: str | None) -> dict[str, Any]:
    return {"object": "engine", "status": "paused" if paused else "running", "weight_version": version}


# LoRA adapters that are loaded and unloaded while a model is served.


class LoadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's request to load an adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=512)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=512)]
    lora_int_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Ignored: only the name counts, as in vLLM."""


class AdapterScale(Struct, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    scale: Annotated[float, Meta(ge=-100, le=100)]


class SetScalesRequest(Struct, forbid_unknown_fields=True):
    """Default scales; as in llama-server, the body may also be the list alone."""

    adapters: list[AdapterScale]


_load = RequestDecoder.for_type(LoadAdapterRequest)
_unload = RequestDecoder.for_type(UnloadAdapterRequest)
_scales = RequestDecoder.for_type(SetScalesRequest)


def read_load(body: bytes) -> LoadAdapterRequest:
    request: LoadAdapterRequest = _load.read(body)
    return request


def read_unload(body: bytes) -> UnloadAdapterRequest:
    request: UnloadAdapterRequest = _unload.read(body)
    return request


def read_scales(body: bytes) -> dict[int, float]:
    request: SetScalesRequest = _scales.read(b'{"adapters":%s}' % body if body.lstrip()[:1] == b"[" else body)
    return {each.id: each.scale for each in request.adapters}
