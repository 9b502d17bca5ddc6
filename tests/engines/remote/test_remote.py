"""A remote engine over servers of this package: what goes in, what comes out, and what stops it."""

import asyncio
from collections.abc import Callable

import httpx
import pytest
from msgspec.structs import replace

from dragoman.engines.protocol import ModelCard
from dragoman.engines.remote import RemoteEngine, RemoteOptions
from dragoman.engines.remote.upstreams import BadUpstream
from dragoman.engines.scripted import CHATML, END_ID, ByteTokenizer, Script, ScriptedEngine, say
from dragoman.errors import BadRequest, ContextOverflow, DragomanError, EngineFailed, Overloaded
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import ConstraintSource, Job, Matcher, Step, TokenLogprob
from tests.engines.remote.support import QUICK, becomes, ids_of, job_of, remote_of, run, serving, steps_of
from tests.support.http import HELLO, post, stream

GRUESSE = [*"Grüße\n".encode(), 200, 201, END_ID]
"""Also bytes that are no text."""


def test_ids_come_through_as_they_are() -> None:
    upstream = ScriptedEngine(Script(GRUESSE, burst=2))
    with serving(upstream) as urls:
        steps = run(urls, lambda engine: steps_of(engine, job_of([5, 6, 7])))
    assert ids_of(steps) == GRUESSE
    assert [step.finish for step in steps if step.finish] == ["stop"]
    assert steps[-1].ids[-1] == END_ID
    assert upstream.jobs[-1].prompt == (5, 6, 7)


def test_the_card_is_the_upstreams() -> None:
    card = ModelCard(name="big", max_model_len=777, adapters=("poet",), constrains=True)
    with serving(ScriptedEngine(say("x"), card=card)) as urls:
        model_card = RemoteEngine.open(urls, ByteTokenizer()).card
    assert (model_card.name, model_card.max_model_len, model_card.adapters) == ("big", 777, ("poet",))
    assert model_card.details["ids"] == "sampled"


def test_sampling_comes_through() -> None:
    upstream = ScriptedEngine(say("x"))
    job = job_of(
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        typical_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={65: 2.0},
        allowed_token_ids=(120, END_ID),
        stop_token_ids=frozenset({66}),
        min_tokens=1,
        ignore_eos=True,
        seed=-5,
        logprobs=2,
    )
    asked = Job(id="", prompt=(9,), sampling=job.sampling, priority=3, cache_salt="s", reuse_prefix=False)
    with serving(upstream) as urls:
        run(urls, lambda engine: steps_of(engine, asked))
    heard = upstream.jobs[-1]
    assert heard.sampling == asked.sampling
    assert (heard.prompt, heard.priority, heard.cache_salt, heard.reuse_prefix) == ((9,), 3, "s", False)


def test_an_adapter_is_asked_for_by_its_name() -> None:
    card = ModelCard(name="big", max_model_len=777, adapters=("poet",))
    upstream = ScriptedEngine(say("x"), card=card)
    with serving(upstream) as urls:
        run(urls, lambda engine: steps_of(engine, replace(job_of(), adapters=(("poet", 1.0),))))
    assert [job.adapter for job in upstream.jobs] == [None, "poet"]


def test_the_upstreams_key_is_sent() -> None:
    settings = Settings(port=0, store="none", shutdown_grace=0, api_key=["k"])
    with background(ScriptedEngine(say("x")), settings) as url:
        ids = ids_of(run([url], lambda engine: steps_of(engine, job_of()), replace(QUICK, key="k")))
        assert ids == [120, END_ID]
        with pytest.raises(BadUpstream, match="answered 401"):
            RemoteEngine.open([url], ByteTokenizer(), QUICK)


def test_one_that_is_silent_before_the_first_token_is_left_for_another() -> None:
    def silent(job: Job) -> Script:
        return say("x") if bytes(job.prompt) == b"Hello" else say("x", fault="hang")

    stuck = ScriptedEngine(silent)
    options = replace(QUICK, silence_s=1.5)

    async def work(engine: RemoteEngine) -> None:
        number = 0
        while len(stuck.jobs) < 2:
            assert ids_of(await steps_of(engine, job_of([number]))) == [*b"two", END_ID]
            number += 1
        assert await becomes(lambda: stuck.live == 0)

    with serving(stuck, ScriptedEngine(say("two"))) as urls:
        run(urls, work, options)
    assert len(stuck.jobs) == 2


def test_logprobs_and_counts_come_through() -> None:
    upstream, job = ScriptedEngine(say("hi")), job_of(logprobs=2)
    with serving(upstream) as urls:
        steps = run(urls, lambda engine: steps_of(engine, job))
    direct = asyncio.run(steps_of(upstream, job))
    assert _logprobs(steps) == _logprobs(direct)
    assert len(_logprobs(steps)) == 3
    assert steps[-1].cached_tokens == direct[0].cached_tokens


def _logprobs(steps: list[Step]) -> list[TokenLogprob]:
    return [entry for step in steps for entry in step.logprobs or ()]


def test_a_stop_id_is_told() -> None:
    with serving(ScriptedEngine(Script([65, 66], finish="stop"))) as urls:
        steps = run(urls, lambda engine: steps_of(engine, job_of(stop_token_ids=frozenset({66}))))
    assert ids_of(steps) == [65, 66]
    assert (steps[-1].finish, steps[-1].ids) == ("stop", [66])


def test_length_is_told() -> None:
    with serving(ScriptedEngine(say("abcdef"))) as urls:
        steps = run(urls, lambda engine: steps_of(engine, job_of(max_tokens=3)))
    assert (ids_of(steps), steps[-1].finish) == ([*b"abc"], "length")


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_cancelling_closes_the_request(way: str) -> None:
    upstream = ScriptedEngine(say("xyz", fault="hang", fault_at=1))
    lone = ScriptedEngine(say("x"))

    async def leave(engine: RemoteEngine) -> bool:
        upstream.jobs.clear()
        steps = engine.generate(job_of())
        if way == "close":
            await anext(steps)
            await steps.aclose()
        else:
            task = asyncio.ensure_future(anext(steps))
            await becomes(lambda: upstream.live == 1)
            await task
            waiting = asyncio.ensure_future(anext(steps))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        return await becomes(lambda: len(upstream.jobs) == 1 and upstream.live == 0)

    with serving(_first_then(upstream, lone)) as urls:
        assert run(urls, leave)


def _first_then(upstream: ScriptedEngine, other: ScriptedEngine) -> ScriptedEngine:
    """`upstream`, but for the first look, which is answered: a hanging engine could not be looked at."""
    hanging = upstream._script
    assert isinstance(hanging, Script)
    upstream._script = lambda job: say("x") if bytes(job.prompt) == b"Hello" else hanging
    return upstream


def test_a_constraint_is_handed_over() -> None:
    class Source:
        def __init__(self, source: ConstraintSource) -> None:
            self.source = source

        def new_matcher(self) -> Matcher:
            raise NotImplementedError

    asked = [
        ConstraintSource("json_schema", '{"type": "object"}'),
        ConstraintSource("regex", "[a-z]+"),
        ConstraintSource("choice", '["a", "b"]'),
        ConstraintSource("gbnf", 'root ::= "a"'),
        ConstraintSource("lark", 'start: "a"'),
    ]
    card = ModelCard(name="m", max_model_len=512, constrains=True)
    upstream = ScriptedEngine(say("x"), card=card)

    async def work(engine: RemoteEngine) -> None:
        for source in asked:
            await steps_of(engine, replace(job_of(), constraint=Source(source)))

    with serving(upstream) as urls:
        run(urls, work)
    assert [job.constraint is not None for job in upstream.jobs] == [False, *[True] * len(asked)]


def failing(status_of: Callable[[Job], Exception]) -> ScriptedEngine:
    """An engine that refuses all jobs but the first look."""

    class FailingEngine(ScriptedEngine):
        def submit(self, job, sink):  # type: ignore[no-untyped-def]
            if bytes(job.prompt) != b"Hello":
                self.jobs.append(job)
                raise status_of(job)
            return super().submit(job, sink)

    return FailingEngine(say("x"))


@pytest.mark.parametrize(
    ("upstream", "ours", "times"),
    [
        (BadRequest("Not that.", param="top_k", code="c"), BadRequest, 1),
        (ContextOverflow("Too long.", param="prompt"), ContextOverflow, 1),
        # It says when it wants to be asked again.
        (Overloaded("Too many."), Overloaded, 1),
        (EngineFailed("It broke."), EngineFailed, 2),
    ],
)
def test_errors_are_mapped(upstream: DragomanError, ours: type[DragomanError], times: int) -> None:
    engine = failing(lambda job: upstream)
    options = replace(QUICK, tries=2)
    with serving(engine) as urls, pytest.raises(ours) as caught:
        run(urls, lambda remote: steps_of(remote, job_of()), options)
    assert type(caught.value) is ours
    assert len(engine.jobs) == 1 + times  # the first look is one, too
    if ours is not EngineFailed:
        assert (caught.value.message, caught.value.param) == (upstream.message, upstream.param)


def test_what_the_upstream_says_of_its_insides_is_not_passed_on() -> None:
    with (
        serving(failing(lambda job: EngineFailed("/secret/path"))) as urls,
        pytest.raises(EngineFailed) as caught,
    ):
        run(urls, lambda engine: steps_of(engine, job_of()), replace(QUICK, tries=1))
    assert "secret" not in caught.value.message


def test_there_is_no_other_try_after_a_token() -> None:
    broken = say("xyz", fault="exception", fault_at=2)
    upstream = ScriptedEngine(lambda job: say("x") if bytes(job.prompt) == b"Hello" else broken)

    async def work(engine: RemoteEngine) -> list[Step]:
        seen = []
        with pytest.raises(EngineFailed):
            async for step in engine.generate(job_of()):
                seen.append(step)
        return seen

    with serving(upstream) as urls:
        assert ids_of(run(urls, work)) == [*b"xy"]
    assert len(upstream.jobs) == 2


def test_another_tokenizer_is_noticed() -> None:
    other = ScriptedEngine(say("x"), tokenizer=ShiftedTokenizer())
    with serving(other) as urls, pytest.raises(BadUpstream, match="has a different tokenizer"):
        RemoteEngine.open(urls, ByteTokenizer())


class ShiftedTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return [byte ^ 1 for byte in text.encode()]


def test_a_model_that_is_not_there() -> None:
    with serving(ScriptedEngine(say("x"))) as urls, pytest.raises(BadUpstream, match="available: scripted"):
        RemoteEngine.open(urls, ByteTokenizer(), RemoteOptions(model="other"))


def test_nobody_is_there() -> None:
    with pytest.raises(BadUpstream, match="No server answers"):
        RemoteEngine.open(["http://127.0.0.1:1"], ByteTokenizer())


def test_a_whole_server_on_top() -> None:
    """Chat, calls and ids of the inner engine, through two servers."""
    text = '<think>\nHm.\n</think>\n\nHi <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    inner = ScriptedEngine(say(text, burst=3))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with serving(inner) as urls:
        engine = RemoteEngine.open(urls, ByteTokenizer(), QUICK)
        settings = Settings(port=0, store="none", dialect="hermes", shutdown_grace=0)
        with background(engine, settings, template=CHATML) as url:
            body = {**HELLO, "tools": tools, "return_token_ids": True, "n": 2}
            whole = post(url, "/v1/chat/completions", body).json()
            chunks = stream(url, "/v1/chat/completions", {**body, "n": 1})
            assert httpx.get(url + "/ready").json()["status"] == "ready"
    for choice in whole["choices"]:
        assert choice["token_ids"] == [*text.encode(), END_ID]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert choice["finish_reason"] == "tool_calls"
    streamed = [id_ for chunk in chunks for choice in chunk["choices"] for id_ in choice.get("token_ids", ())]
    assert streamed == [*text.encode(), END_ID]
    assert whole["usage"]["completion_tokens"] == 2 * len(streamed)


def test_an_engine_can_be_started_again() -> None:
    with serving(ScriptedEngine(say("x"))) as urls:
        engine = RemoteEngine.open(urls, ByteTokenizer(), QUICK)
        for _ in range(2):

            async def once() -> list[Step]:
                await engine.start()
                try:
                    return await steps_of(engine, job_of())
                finally:
                    await engine.stop()

            assert ids_of(asyncio.run(once())) == [120, END_ID]


def test_open_is_for_code_without_an_event_loop() -> None:
    async def main() -> None:
        with serving(ScriptedEngine(say("x"))) as urls:
            async with remote_of(urls) as engine:
                assert ids_of(await steps_of(engine, job_of())) == [120, END_ID]

    asyncio.run(main())
