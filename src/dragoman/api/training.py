"""What those who train a model ask for: trajectories with rewards, and a pause to change the weights.

A trajectory is what the model saw and sampled, turn by turn, as sequences to train on. Turns whose prompt
goes on from the ids of the turn before are one sequence. Where a prompt was written anew, because a
template or a client has changed what was said, another sequence begins: nothing is trained on that was not
so.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from dragoman.api.read import Reader
from dragoman.errors import NotFound, TrajectoryTooLarge
from dragoman.limits import check_count
from dragoman.store import Record
from dragoman.types import Traced

MOST_IDS = 4 * 1024 * 1024
"""Of one reply."""
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


class Rewarded(Struct):
    """The same without the turns."""

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
    histories: list[str]
    """How the prompt was to have earlier answers, for each turn."""
    finish: str | None = None
    """How the last turn ended."""
    choice: int = 0
    """Of the last answer."""
    split: str | None = None
    """Why the first prompt does not go on from the answer before it, if there was one."""


_READER = Reader.of(SetRewards)
_trace = msgspec.json.Decoder(Trace).decode
_rewards = msgspec.json.Decoder(Rewarded).decode


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


def add_rewards(record: Record, rewards: dict[str, float]) -> bytes:
    """The body with these rewards added."""
    trace = trace_of(record)
    trace.rewards |= rewards
    check_count(len(trace.rewards), MOST_REWARDS, "rewards", "names of rewards")
    return _encode(trace)


def segments(turns: Iterable[Traced]) -> list[Segment]:
    made: list[Segment] = []
    for turn in turns:
        if not made or tuple(made[-1].ids) != turn.prompt[: len(made[-1].ids)]:
            made.append(Segment([], [], [], [], [], [], split=turn.split or None))
        _extend(made[-1], turn)
    return made


def _extend(segment: Segment, turn: Traced) -> None:
    prompt = turn.prompt[len(segment.ids) :]
    segment.ids += [*prompt, *turn.ids]
    segment.mask += [0] * len(prompt) + [1] * len(turn.ids)
    sampled: Sequence[float | None] = turn.logprobs or [None] * len(turn.ids)
    segment.logprobs += [*[None] * len(prompt), *sampled]
    segment.weight_versions.append(turn.weight_version)
    segment.answers.append(turn.source)
    segment.histories.append(turn.history)
    segment.finish, segment.choice = turn.finish, turn.choice


def leading_to(prompt: tuple[int, ...], traces: Sequence[Trace]) -> list[Traced]:
    """The turns that a prompt goes on from: of each answer, the choice that the next one went on from."""
    found: list[list[Traced]] = []
    for trace in reversed(traces):
        taken = _goes_on_from(trace, prompt)
        found.append([turn for turn in trace.turns if turn.choice == taken])
        prompt = found[-1][0].prompt if found[-1] else prompt
    return [turn for turns in reversed(found) for turn in turns]


def _goes_on_from(trace: Trace, prompt: tuple[int, ...]) -> int:
    """The last id may be an end that the template writes otherwise."""
    kept = (turn.choice for turn in trace.turns if turn.all[:-1] == prompt[: turn.count - 1])
    return next(kept, 0)


def sequences(records: Sequence[Record], most_ids: int | None = None) -> list[Segment]:
    """Those of all choices of the last answer. Records come in the order of their making."""
    *before, last = [trace_of(one) for one in records]
    # Choices have one prompt, so what leads to them is looked for once.
    known: dict[tuple[int, ...], list[Traced]] = {}
    made: list[Segment] = []
    for choice in sorted({turn.choice for turn in last.turns}):
        turns = [turn for turn in last.turns if turn.choice == choice]
        prompt = turns[0].prompt
        if prompt not in known:
            known[prompt] = leading_to(prompt, before)
        made += segments([*known[prompt], *turns])
        if most_ids is not None and sum(len(segment.ids) for segment in made) > most_ids:
            raise TrajectoryTooLarge
    return made


def rewards(records: Sequence[Record]) -> dict[str, float]:
    """Of the last answer, and of those before it that it does not have itself."""
    return {name: value for one in records for name, value in _rewards(one.body).rewards.items()}


def describe_trajectory(id_: str, records: Sequence[Record]) -> dict[str, Any]:
    """The trajectory up to an answer, or of a conversation."""
    return {
        "id": id_,
        "object": "trajectory",
        "model": records[-1].model,
        "segments": [msgspec.structs.asdict(one) for one in sequences(records, MOST_IDS)],
        "rewards": rewards(records),
    }


def unknown_trajectory(id_: str) -> NotFound:
    message = (
        f"There is no trajectory '{id_[:128]}': send store and return_token_ids with a request, or start the"
        " server with --trajectories."
    )
    return NotFound(message, code="not_found")


# Weights that change while they serve.


class PauseRequest(Struct, forbid_unknown_fields=True):
    pass


class ResumeRequest(Struct, forbid_unknown_fields=True):
    weight_version: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


_pause = Reader.of(PauseRequest)
_resume = Reader.of(ResumeRequest)


def read_pause(body: bytes) -> None:
    """There is nothing to say, so nothing need be sent."""
    _pause.read(body or b"{}")


def read_resume(body: bytes) -> ResumeRequest:
    request: ResumeRequest = _resume.read(body or b"{}")
    return request


def describe_engine(*, paused: bool, version: str | None) -> dict[str, Any]:
    return {"object": "engine", "status": "paused" if paused else "running", "weight_version": version}


# LoRA adapters that come and go while a model is served.


class LoadAdapter(Struct, kw_only=True, forbid_unknown_fields=True):
    """As vLLM has it."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=512)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadAdapter(Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=512)]
    lora_int_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """The name alone counts, in vLLM too."""


class AdapterScale(Struct, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    scale: Annotated[float, Meta(ge=-100, le=100)]


class SetScales(Struct, forbid_unknown_fields=True):
    """llama-server takes the list by itself, and so do we."""

    adapters: list[AdapterScale]


_load = Reader.of(LoadAdapter)
_unload = Reader.of(UnloadAdapter)
_scales = Reader.of(SetScales)


def read_load(body: bytes) -> LoadAdapter:
    request: LoadAdapter = _load.read(body)
    return request


def read_unload(body: bytes) -> UnloadAdapter:
    request: UnloadAdapter = _unload.read(body)
    return request


def read_scales(body: bytes) -> dict[int, float]:
    request: SetScales = _scales.read(b'{"adapters":%s}' % body if body.lstrip()[:1] == b"[" else body)
    return {each.id: each.scale for each in request.adapters}
