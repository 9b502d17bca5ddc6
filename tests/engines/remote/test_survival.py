"""An upstream that dies under a stream: at every byte of it, in every API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from dragoman.engines.remote import RemoteEngine, RemoteOptions
from dragoman.engines.remote.upstreams import MISSES
from dragoman.engines.scripted import CHATML, END_ID, ByteTokenizer, Script, ScriptedEngine, say
from dragoman.errors import DragomanError, Unavailable
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job, Step, TextStep
from tests.engines.remote.support import QUICK, becomes, ids_of, job_of, run, serving, steps_of

SAID = [*"né!".encode(), END_ID]
PROMPT = (1, 2, 3)
CALM = RemoteOptions(check_s=600, connect_s=5, silence_s=30)


class Mortal:
    """Two servers that go on with `SAID` wherever a prompt leaves off. The first answer is cut short."""

    def __init__(self, *, ids: bool, cut: int | None = None) -> None:
        self._ids = ids
        self.cut = cut
        """Bytes of the next reply that are sent before the connection is closed."""
        self.prompts: list[Any] = []

    def reply(self, prompt: Any) -> bytes:
        items = [*bytes(prompt[len(PROMPT) :])] if self._ids else [*prompt.removeprefix("ask:").encode()]
        chunks = [self._chunk([id_]) for id_ in SAID[len(items) :]] if self._ids else self._texts(items)
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
        events = [f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in [*chunks, usage]]
        return _http([*events, "data: [DONE]\n\n"])

    def _chunk(self, ids: list[int]) -> dict[str, Any]:
        finish = "stop" if ids[-1] == END_ID else None
        return {"choices": [{"text": "", "token_ids": ids, "finish_reason": finish}]}

    def _texts(self, said: list[int]) -> list[dict[str, Any]]:
        rest = bytes(SAID[len(said) : -1]).decode()
        texts = [{"choices": [{"text": char, "finish_reason": None}]} for char in rest]
        return [*texts, {"choices": [{"text": "", "finish_reason": "stop"}]}]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(sizes[0].partition(b":")[2])) if sizes else b""
                if not self._answer(head.split()[1], body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, path: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection lives on."""
        if path != b"/v1/completions":
            known = {"data": [{"id": "m", "owned_by": "dragoman" if self._ids else "me"}]}
            writer.write(_http([json.dumps(known)], "application/json"))
            return True
        asked = json.loads(body)
        if self._ids != isinstance(asked["prompt"], list):
            writer.write(_http(['{"error": {"message": "No."}}'], "application/json", "400 Bad"))
            return True
        if asked["max_tokens"] == 1:  # the first look
            fields = {"text": "x", "token_ids": [120], "finish_reason": "length"}
            chunk = {"choices": [fields]}
            writer.write(_http([f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]))
            return True
        self.prompts.append(asked["prompt"])
        cut, self.cut = self.cut, None
        writer.write(self.reply(asked["prompt"])[:cut])
        return cut is None


class HangingEngine(Mortal):
    """Who cuts an answer short says nothing more, to nobody; its connections stay open."""

    hung = 0
    """The port of that one."""

    def _answer(self, path: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        here = writer.get_extra_info("sockname")[1]
        if here != self.hung and not super()._answer(path, body, writer):
            self.hung = here
        return True


def _http(parts: list[str], kind: str = "text/event-stream", status: str = "200 OK") -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part.encode()), part.encode()) for part in parts)
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + chunks + b"0\r\n\r\n"


@asynccontextmanager
async def two_of(mortal: Mortal, options: RemoteOptions = CALM) -> AsyncIterator[RemoteEngine]:
    servers = [await asyncio.start_server(mortal.serve, "127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    engine = await RemoteEngine.connect(urls, ByteTokenizer(), options)
    try:
        yield engine
    finally:
        await engine.stop()
        for server in servers:
            server.close()


def heal(engine: RemoteEngine) -> None:
    for upstream in engine.upstreams:
        upstream.record_success()
        upstream.mark_up()


def test_ids_are_neither_lost_nor_doubled_wherever_it_dies() -> None:
    async def main() -> None:
        mortal = Mortal(ids=True)
        whole = len(mortal.reply(PROMPT))
        async with two_of(mortal) as engine:
            for cut in range(whole):
                mortal.prompts.clear()
                mortal.cut = cut
                steps = await steps_of(engine, job_of(PROMPT))
                assert ids_of(steps) == SAID, cut
                assert [step.finish for step in steps if step.finish] == ["stop"], cut
                assert len(mortal.prompts) <= 2
                heal(engine)

    asyncio.run(main())


def test_an_answer_goes_on_elsewhere_where_its_server_hangs() -> None:
    async def main() -> None:
        hanging = HangingEngine(ids=True)
        hanging.cut = len(hanging.reply(PROMPT)) // 2
        async with two_of(hanging) as engine:
            asking = asyncio.create_task(steps_of(engine, job_of(PROMPT)))
            assert await becomes(lambda: hanging.hung > 0)
            [stuck] = [one for one in engine.upstreams if one.url.endswith(f":{hanging.hung}")]
            for line in stuck.lines.busy:
                line.heard -= 60
            # Looks at it go unanswered, as they would.
            for _ in range(MISSES):
                stuck.mark_unanswered()
            assert ids_of(await asking) == SAID
            assert len(hanging.prompts) == 2

    asyncio.run(main())


def test_text_is_neither_lost_nor_doubled_wherever_it_dies() -> None:
    async def main() -> None:
        mortal = Mortal(ids=False)
        job = replace(job_of(PROMPT), text="ask:")
        async with two_of(mortal) as engine:
            for cut in range(len(mortal.reply("ask:"))):
                mortal.cut = cut
                steps = await steps_of(engine, job)
                text = "".join(step.text for step in steps if isinstance(step, TextStep))
                assert text == "né!", cut
                heal(engine)

    asyncio.run(main())


def _after(mortal: Mortal, events: int) -> int:
    """The bytes of a reply up to the end of so many events."""
    reply, at = mortal.reply(PROMPT), 0
    for _ in range(events):
        at = reply.index(b"\n\n\r\n", at) + 4
    return at


def _asked_after(job: Job, options: RemoteOptions = CALM) -> tuple[list[Any], list[int] | DragomanError]:
    """The prompts that came, and the answer, where the first upstream dies after two ids."""

    async def main() -> tuple[list[Any], list[int] | DragomanError]:
        mortal = Mortal(ids=True)
        mortal.cut = _after(mortal, 2)
        async with two_of(mortal, options) as engine:
            try:
                return mortal.prompts, ids_of(await steps_of(engine, job))
            except DragomanError as error:
                return mortal.prompts, error

    return asyncio.run(main())


def test_it_goes_on_from_the_ids_so_far() -> None:
    prompts, item = _asked_after(job_of(PROMPT))
    assert prompts == [[*PROMPT], [*PROMPT, *SAID[:2]]]
    assert item == SAID


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (job_of(PROMPT, presence_penalty=0.5), CALM),
        (job_of(PROMPT, frequency_penalty=0.5), CALM),
        (job_of(PROMPT), replace(CALM, resume=False)),
        (job_of(PROMPT), replace(CALM, tries=1)),
    ],
)
def test_what_depends_on_more_than_the_ids_ends_with_an_error(job: Job, options: RemoteOptions) -> None:
    prompts, error = _asked_after(job, options)
    assert len(prompts) == 1
    assert isinstance(error, DragomanError)


def test_a_connection_that_was_closed_at_rest_is_no_failure() -> None:
    async def main() -> None:
        mortal = Mortal(ids=True)
        async with two_of(mortal) as engine:
            await steps_of(engine, job_of(PROMPT))
            [resting] = [upstream for upstream in engine.upstreams if upstream.lines._idle]
            line = resting.lines._idle[0]
            mortal.cut = 0  # the reply has no byte, as where the connection was closed before it was asked
            line.used = True
            assert ids_of(await steps_of(engine, job_of(PROMPT))) == SAID
            assert {upstream._failures for upstream in engine.upstreams} == {0}

    asyncio.run(main())


# In every API, where nobody else is there.


APIS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "x"}]},
        lambda text: '"error"' in text.rpartition("data: {")[2],
    ),
    "/v1/completions": ({"prompt": "x"}, lambda text: '"error"' in text.rpartition("data: {")[2]),
    "/v1/responses": ({"input": "x"}, lambda text: "event: response.failed" in text),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
        lambda text: "event: error\n" in text,
    ),
    "/api/chat": (
        {"messages": [{"role": "user", "content": "x"}]},
        lambda text: "error" in json.loads(text.strip().rpartition("\n")[2]),
    ),
    "/api/generate": ({"prompt": "x"}, lambda text: "error" in json.loads(text.strip().rpartition("\n")[2])),
}


@contextmanager
def front_of_one_that_dies() -> Iterator[tuple[str, ExitStack]]:
    """An upstream that says two ids and hangs; closing the stack kills it."""

    def stuck(job: Job) -> Script:
        looks = job.prompt == tuple(b"Hello")
        return say("x") if looks else say("xyz", fault="hang", fault_at=2)

    with ExitStack() as upstream:
        [url] = upstream.enter_context(serving(ScriptedEngine(stuck)))
        engine = RemoteEngine.open([url], ByteTokenizer(), replace(QUICK, tries=1))
        settings = Settings(port=0, store="none", shutdown_grace=0)
        with background(engine, settings, template=CHATML) as front:
            yield front, upstream


@pytest.mark.parametrize("path", APIS)
def test_a_stream_that_cannot_go_on_is_told(path: str) -> None:
    body, tells = APIS[path]
    with front_of_one_that_dies() as (front, upstream):
        asked = {"model": "scripted", "stream": True, **body}
        with httpx.stream("POST", front + path, json=asked, timeout=30) as reply:
            text, killed = "", False
            for part in reply.iter_text():
                text += part
                if not killed and '"y"' in text:
                    killed = True
                    upstream.close()
    assert killed
    assert tells(text), text


# Many at once.


def test_streams_go_on_when_one_of_two_servers_is_killed() -> None:
    """And none is told anything of it."""
    text = "a long answer, of which each stream has heard the beginning"

    def slow(job: Job) -> Script:
        value = bytes(id_ for id_ in job.prompt[1:] if id_ < 256).decode()
        return say(text.removeprefix(value)) if bytes(job.prompt) != b"Hello" else say("x")

    one, two = (ScriptedEngine(slow, interval=0.01) for _ in range(2))

    async def work(engine: RemoteEngine) -> None:
        heard: dict[int, list[int]] = {number: [] for number in range(8)}

        async def listen(number: int) -> None:
            async for step in engine.generate(job_of([number])):
                heard[number] += step.ids

        jobs = [asyncio.create_task(listen(number)) for number in heard]
        await becomes(lambda: all(len(ids) > 3 for ids in heard.values()))
        await asyncio.to_thread(first.close)
        await asyncio.gather(*jobs)
        assert {bytes(ids[:-1]).decode() for ids in heard.values()} == {text}
        with pytest.raises(Unavailable):
            await asyncio.to_thread(rest.close)
            await steps_of(engine, job_of([1]))

    with ExitStack() as first, ExitStack() as rest:
        [a] = first.enter_context(serving(one))
        [b] = rest.enter_context(serving(two))
        run([a, b], work)


def test_steps_know_nothing_of_the_second_upstreams_cache() -> None:
    async def main() -> list[Step]:
        mortal = Mortal(ids=True)
        mortal.cut = _after(mortal, 1)
        async with two_of(mortal) as engine:
            return await steps_of(engine, job_of(PROMPT))

    assert [step.cached_tokens for step in asyncio.run(main()) if step.cached_tokens is not None] == []


def test_health_lists_the_upstreams() -> None:
    with serving(ScriptedEngine(say("x"))) as urls:
        engine = RemoteEngine.open(urls, ByteTokenizer(), QUICK)
        for keys, named in (([], True), (["k"], False)):
            settings = Settings(port=0, store="none", shutdown_grace=0, api_key=keys)
            with background(engine, settings, template=CHATML) as front:
                [result] = httpx.get(front + "/health").json()["upstreams"]
            assert (result["status"], result["running"]) == ("ready", 0)
            assert ("url" in result) == named
