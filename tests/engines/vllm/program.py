"""What needs vLLM in the process itself: `python -m tests.engines.vllm.program MODEL ENGINE_ARGS`.

It prints what it found, as JSON, in the last line.
"""

import asyncio
import json
import sys
from typing import Any

from dragoman.engines.vllm import VllmAsyncLLMEngine, VllmEngine, VllmOptions, open_vllm
from dragoman.errors import SettingsError
from dragoman.types import Job, Sampling, Step

SAMPLING = Sampling(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
JOB = Job(id="same", prompt=(504, 2988, 282, 4649), sampling=SAMPLING)
LONG = 2000
CANCELLED_AT = 5


def overhear_context(fields: dict[str, Any]) -> None:
    """For what vLLM was told that it is to be used."""
    from vllm.v1.engine.async_llm import AsyncLLM

    make = AsyncLLM.from_engine_args

    def heard(*given: Any, **named: Any) -> Any:
        fields["used_for"] = named["usage_context"].name
        return make(*given, **named)

    AsyncLLM.from_engine_args = staticmethod(heard)


def refusal(model: str, **options: Any) -> str:
    try:
        open_vllm(model, VllmOptions(**options))
    except SettingsError as error:
        return error.message
    return ""


def plain(steps: list[Step]) -> dict[str, Any]:
    logprobs = [entry for step in steps for entry in step.logprobs or ()]
    return {
        "ids": [id_ for step in steps for id_ in step.ids],
        "logprobs": [entry.logprob for entry in logprobs],
        "top": [[list(pair) for pair in entry.top] for entry in logprobs],
        "prompt": [entry and entry.logprob for entry in steps[0].prompt_logprobs or ()],
        "finish": steps[-1].finish,
        "cached": steps[0].cached_tokens,
    }


async def outputs_after_a_cancel(engine: VllmEngine, client: Any) -> int:
    """How many of vLLM's own outputs are about a request that was cancelled, while another one runs on."""
    heard: list[str] = []
    decode = client.decoder.decode

    def overheard(frames: Any) -> Any:
        outputs = decode(frames)
        heard.extend(output.request_id for output in outputs.outputs)
        return outputs

    client.decoder.decode = overheard
    cancelled = engine.generate(job("cancelled", LONG))
    for _ in range(CANCELLED_AT):
        await anext(cancelled)
    await cancelled.aclose()
    heard.clear()
    other = [step async for step in engine.generate(job("other", 50))]
    assert other[-1].finish == "length"
    return sum(id.startswith("cancelled") for id in heard)


async def pause(engine: VllmEngine) -> dict[str, Any]:
    """A job that is stopped in the middle, while the weights change."""
    steps: list[Step] = []
    begun, over = asyncio.Event(), asyncio.Event()

    def sink(step: Step) -> None:
        steps.append(step)
        begun.set()
        if step.finish is not None:
            over.set()

    engine.submit(job("paused", 400), sink)
    await begun.wait()
    await engine.pause()
    await engine.check()
    before = len(steps)
    for _ in range(10):
        await engine.check()
    during = len(steps)
    await engine.resume("second")
    await over.wait()
    return {
        "moved": during - before,
        "ids": sum(len(step.ids) for step in steps),
        "versions": [steps[0].weight_version, steps[-1].weight_version, engine.weight_version],
    }


def job(id: str, tokens: int) -> Job:
    return Job(id=id, prompt=JOB.prompt, sampling=Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))


async def look(engine: VllmEngine, llm: Any) -> dict[str, Any]:
    late = await outputs_after_a_cancel(engine, llm.engine_core)
    await engine.start()
    direct = plain([step async for step in engine.generate(JOB)])
    # vLLM's own reader is a task.
    ours = not isinstance(llm.engine_core.resources.output_queue_task, asyncio.Task)
    paused = await pause(engine)
    # From here on nobody reads the core but vLLM itself.
    await engine._core.stop()
    llm.engine_core.resources.output_queue_task = None
    public = VllmAsyncLLMEngine(llm)
    generated = plain([step async for step in public.generate(JOB)])
    await public.check()
    await public.stop()
    return {"socket": ours, "direct": direct, "generated": generated, "late": late, "paused": paused}


def main(model: str, engine_args: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "unknown": refusal(model, engine_args={"enforce_eagr": True}),
        "setting": refusal(model, engine_args={"max-num-queued-reqs": 3}),
        "twice": refusal(model, context=64, engine_args={"max_model_len": 64}),
    }
    overhear_context(fields)
    engine = open_vllm(model, VllmOptions(context=4096, slots=4, engine_args=engine_args))
    assert isinstance(engine, VllmEngine)
    fields |= asyncio.run(look(engine, engine._llm))
    print("\n" + json.dumps(fields))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
