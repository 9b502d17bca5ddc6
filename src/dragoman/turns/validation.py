"""Turns on engines that cannot constrain their output: answers are checked instead.

If a tool is `strict` and the model calls it on its own, the answer streams as it comes, and its arguments are
checked afterwards. If a call is required or the text has a format, and the operator allows it
(`unconstrained: check`), the answer is buffered until it is complete. An answer that fails the check is not
sent: the model is told what is wrong and answers again, a few times, and then the turn fails.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from dragoman.constrain.calls.tool_schemas import close_objects, strict_names
from dragoman.constrain.schema.validator import find_json_fault
from dragoman.errors import ConstraintFailed, ContextOverflow, DragomanError, EngineFailed, InvalidAnswer
from dragoman.limits import Limits
from dragoman.turns.choice_reader import INPUT
from dragoman.turns.constraints import required_constraint, text_constraint
from dragoman.turns.plan import TurnPlan
from dragoman.turns.spec import OutputConstraint, TurnSpec
from dragoman.turns.turn import Turn
from dragoman.types import Answer, Conversation, Event, EventFold, Message, Usage

if TYPE_CHECKING:
    from dragoman.turns.served_model import ServedModel

logger = logging.getLogger("dragoman.turns")

TRIES = 3
"""Answers that the model may write before the turn fails."""


def checked_turn(model: "ServedModel", plan: TurnPlan, spec: TurnSpec, source: str) -> Turn:
    """Create a turn that is checked, or whose tokens count toward the budget of its key."""
    if not plan.unenforced:
        return model.make_turn(MeteredTurn, plan, spec, source)
    holds, metered = required_constraint(spec) is not None, model.queue.meter is not None
    kind: type[CheckedTurn] = RetryingTurn if holds else PostCheckedTurn
    if metered:
        kind = MeteredRetryingTurn if holds else MeteredPostCheckedTurn
    turn = model.make_turn(kind, plan, spec, source)
    turn.model, turn.spec, turn.source = model, spec, source
    turn.unenforced = "" if holds else plan.unenforced
    return turn


class CheckedTurn(Turn):
    model: "ServedModel"
    spec: TurnSpec
    source: str

    async def _look(self, answers: Sequence[Answer]) -> str | None:
        """Find what is wrong with the answers, in a thread: schemas and answers may be long."""
        looking = partial(find_faults, self.spec, self.model.limits, answers)
        return await self.model.workers.run(self.spec.owner, 0, looking, always_offload=True)


class PostCheckedTurn(CheckedTurn):
    """A turn that streams; `find_fault()` checks the answers afterwards."""

    _seen: EventFold | None = None

    def take(self) -> list[Event]:
        taken = super().take()
        self._seen = self._seen or EventFold(self.choices)
        self._seen.add(taken)
        return taken

    async def find_fault(self) -> str | None:
        if self._seen is None or len(self.finishes) < self.choices:
            return None
        with suppress(ConstraintFailed):
            # An answer that cannot be checked is passed on as it is.
            return await self._look(self._seen.done())
        return None


class RetryingTurn(CheckedTurn):
    """A turn that emits no event before an answer passes the check, or all attempts failed."""

    _held = True
    _work: asyncio.Task[None] | None = None
    _released: asyncio.Future[None] | None = None
    _spent: Usage | None = None
    """Tokens of all attempts, set once there is a second one."""

    @property
    def usage(self) -> Usage:
        return super().usage if self._spent is None else self._spent

    @property
    def ready(self) -> bool:
        return not self._held and super().ready

    @property
    def is_over(self) -> bool:
        return self._closed or (not self._held and super().is_over)

    def take(self) -> list[Event]:
        return [] if self._held else super().take()

    async def next(self) -> list[Event]:
        await self._release()
        return await super().next()

    async def wait_started(self, most: float) -> None:
        """Until the first event is sent, an error can still set the HTTP status."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most):
                await self._release()
        self._raise_failure()

    async def _release(self) -> None:
        if self._held and not self._closed:
            self._released = self._released or self._loop.create_future()
            await asyncio.shield(self._released)

    def wake(self) -> None:
        if self._held and not self._closed:
            if not self._left and self._work is None:
                self._work = self._loop.create_task(self._work_out())
            return
        if self._released is not None and not self._released.done():
            self._released.set_result(None)
        super().wake()

    def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
        super().close()

    async def _work_out(self) -> None:
        try:
            await self._try_on()
        except asyncio.CancelledError:
            raise
        except DragomanError as error:
            self._fail_with(error)
        except Exception:
            logger.exception("Checking an answer failed")
            self._fail_with(EngineFailed("The answer was not checked; the server's log says why."))
        self._held = False
        self.wake()

    async def _try_on(self) -> None:
        for number in range(1, TRIES + 1):
            if any(finish.error is not None for finish in self.finishes.values()):
                return
            answers = _fold(self._pending, self.choices)
            fault = await self._look(answers)
            if fault is None:
                return
            if number == TRIES:
                break
            try:
                await self._hear(await self._again(answers, fault))
            except ContextOverflow:
                # The description of the fault does not fit into the context.
                break
        self._fail_with(InvalidAnswer(f"The model's answer does not match the request: {fault}."))

    async def _again(self, answers: Sequence[Answer], fault: str) -> Turn:
        spec = retry_spec(self.spec, answers, fault)
        plan = await self.model.plan(spec, 0)
        # For the client, the retry answers its original messages.
        plan = replace(plan, answered_prompts=self._plan.answered_prompts)
        return self.model.make_turn(Turn, plan, spec, self.source)

    async def _hear(self, turn: Turn) -> None:
        """Run another attempt; its events and its prompt replace those of the last one."""
        events: list[Event] = []
        spent = self.usage
        async with turn:
            try:
                while not turn.is_over:
                    events += await turn.next()
            finally:
                self._spent = spent + turn.usage
        self.jobs, self.prompt_logprobs = turn.jobs, turn.prompt_logprobs
        self._pending, self.finishes, self.records = events, turn.finishes, turn.records

    def _fail_with(self, error: DragomanError) -> None:
        self._pending = [
            Event("finish", choice, finish="error", error=error) for choice in range(self.choices)
        ]
        self.finishes = {event.choice: event for event in self._pending}


class MeteredTurn(Turn):
    """A turn that reserves tokens of its key's budget; in the end only the tokens it used count."""

    _settle: Callable[[int], None] | None = None

    async def __aenter__(self) -> Self:
        if self._queue.meter is not None:
            answers = self._spec.sampling.max_tokens * self.choices or None
            self._settle = self._queue.meter(self._spec.owner, sum(self._prompt_tokens), answers)
        try:
            return await super().__aenter__()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        if (settle := self._settle) is not None:
            self._settle = None
            # Turns that never reached the engine cost nothing.
            settle(self.usage.prompt_tokens + self.usage.completion_tokens if self._started else 0)


class MeteredPostCheckedTurn(MeteredTurn, PostCheckedTurn):
    pass


class MeteredRetryingTurn(MeteredTurn, RetryingTurn):
    """A checked turn whose attempts all count toward the budget."""


def _fold(events: Sequence[Event], choices: int) -> list[Answer]:
    fold = EventFold(choices)
    fold.add(events)
    return fold.done()


# Faults of an answer.


async def log_fault(log_fields: dict[str, Any], turn: Turn) -> None:
    """Record in the access log that the answer violates what the engine could not enforce."""
    if (fault := await turn.find_fault()) is not None:
        logger.info("An answer violates '%s': %s", turn.unenforced, fault)
        log_fields["broken"] = turn.unenforced


def find_faults(spec: TurnSpec, limits: Limits, answers: Sequence[Answer]) -> str | None:
    """Return the first fault of all answers, as a sentence without its period."""
    faults = (_fault(spec, limits, answer) for answer in answers)
    return next((fault for fault in faults if fault is not None), None)


def _fault(spec: TurnSpec, limits: Limits, answer: Answer) -> str | None:
    if answer.finish != "stop" or answer.stop is not None:
        # A truncated answer may be incomplete, as under a constraint.
        return None
    if answer.calls:
        return _call_fault(spec, answer)
    if spec.tool_policy is not None and spec.tool_policy.required:
        return "it contains no tool call"
    return (
        None
        if spec.output_constraint is None
        else _text_fault(spec.output_constraint, limits, answer.text.strip())
    )


def _call_fault(spec: TurnSpec, answer: Answer) -> str | None:
    reading, calling = spec.parsing, spec.tool_policy
    assert reading is not None
    tools = {tool["function"]["name"]: tool["function"] for tool in reading.tools}
    callable_ = tools if calling is None or calling.names is None else calling.names
    strict = tools if calling is not None and calling.required else strict_names(reading.tools)
    for call in answer.calls:
        if call.name not in callable_:
            return f"it calls '{call.name[:64]}', which is not among the tools that may be called"
        if call.name not in strict:
            continue
        schema = close_objects(tools[call.name].get("parameters") or {"properties": {}})
        arguments = json.dumps({INPUT: call.arguments}) if call.name in reading.custom else call.arguments
        if fault := find_json_fault(arguments, {"type": "object", **schema}):
            return f"the arguments of '{call.name[:64]}' do not fit: {fault}"
    return None


def _text_fault(wanted: OutputConstraint, limits: Limits, text: str) -> str | None:
    match wanted.syntax:
        case "json_object":
            return find_json_fault(text, {"type": "object"})
        case "json_schema":
            schema = json.loads(wanted.value) if isinstance(wanted.value, str) else wanted.value
            return find_json_fault(text, schema)
    return (
        None
        if text_constraint(wanted, limits).accepts(text)
        else "the text does not match the requested format"
    )


# The correction for the model.


def retry_spec(spec: TurnSpec, answers: Sequence[Answer], fault: str) -> TurnSpec:
    """Return the conversation with the rejected answer and its fault, or the same one with another seed."""
    if spec.sampling.seed is not None:
        spec = replace(spec, sampling=replace(spec.sampling, seed=spec.sampling.seed + 1))
    item = spec.prompts[0]
    if not isinstance(item, Conversation) or len(answers) > 1 or _goes_on(item):
        return spec
    text = answers[0].text or "\n".join(f"{call.name}: {call.arguments}" for call in answers[0].calls)
    more = (
        Message(role="assistant", content=text or "..."),
        Message(role="user", content=f"This cannot be used: {fault}. Answer again, with {_wish(spec)}."),
    )
    return replace(spec, prompts=(replace(item, messages=(*item.messages, *more)),))


def _goes_on(conversation: Conversation) -> bool:
    return (
        not conversation.add_generation_prompt
        or conversation.continue_final_message
        or bool(conversation.response_prefix)
    )


def _wish(spec: TurnSpec) -> str:
    asked = required_constraint(spec)
    if not isinstance(asked, OutputConstraint):
        names = spec.tool_policy.names if spec.tool_policy and spec.tool_policy.names else ()
        return f"a call of {' or '.join(names) if names else 'one of the tools'} and nothing else"
    return f"{_describe(asked)} and nothing else"


def _describe(wanted: OutputConstraint) -> str:
    value = wanted.value
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    words: Mapping[str, str] = {
        "json_object": "a JSON object",
        "json_schema": f"JSON that this schema allows: {shown}",
        "regex": f"a text that this regular expression matches: {shown}",
        "choice": f"one of these texts: {shown}",
    }
    return words.get(wanted.syntax, f"a text of this grammar: {shown}")
