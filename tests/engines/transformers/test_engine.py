"""Models of `transformers`, held against the library's own answers. `make torch` runs this with a torch."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import dragoman
from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.engines.protocol import CallbackEngine, EmbeddingEngine, LifecycleEngine, PausableEngine
from dragoman.engines.transformers import TransformersEngine
from dragoman.engines.transformers.engine import TransformersContinuation
from dragoman.errors import BadRequest, ConstraintFailed, EngineFailed, ModelFileError, Unavailable
from dragoman.turns.constraints import CompiledConstraint
from dragoman.types import Job, Sampling, Step
from tests.engines.transformers.conftest import OPTIONS

torch = pytest.importorskip("torch")

PROMPTS = [[72, 105], [65, 66, 67, 68], list(range(60, 100)), [256, 257]]


def job(prompt: list[int], most: int = 8, *, n: int = 1, constraint: Any = None, **sampling: Any) -> Job:
    asked = Sampling(**{"max_tokens": most, "temperature": 0.0, **sampling})
    return Job(id=f"{id(asked)}", prompt=tuple(prompt), n=n, sampling=asked, constraint=constraint)


async def collect(engine: TransformersEngine, asked: Job) -> list[Step]:
    return [step async for step in engine.generate(asked)]


def run(engine: TransformersEngine, prompt: list[int], most: int = 8, **asked: Any) -> list[Step]:
    return asyncio.run(collect(engine, job(prompt, most, **asked)))


def ids(steps: list[Step]) -> list[int]:
    return [id_ for step in steps for id_ in step.ids]


def logits(engine: TransformersEngine, prompt: list[int]) -> Any:
    """What the model says of the next id, without any of the machinery."""
    with torch.no_grad():
        return engine._loaded.model(input_ids=torch.tensor([prompt])).logits[0, -1]


def greedy(engine: TransformersEngine, prompt: list[int], most: int) -> list[int]:
    numbers: list[int] = []
    for _ in range(most):
        numbers.append(int(logits(engine, prompt + numbers).argmax()))
    return numbers


def test_it_is_every_kind_of_engine(engine: TransformersEngine) -> None:
    for kind in (CallbackEngine, LifecycleEngine, EmbeddingEngine, PausableEngine):
        assert isinstance(engine, kind)


def test_greedy_answers_are_the_models_own_in_company_too(engine: TransformersEngine) -> None:
    async def main() -> list[list[Step]]:
        return list(await asyncio.gather(*(collect(engine, job(p, ignore_eos=True)) for p in PROMPTS)))

    items = [ids(steps) for steps in asyncio.run(main())]
    assert items == [greedy(engine, prompt, 8) for prompt in PROMPTS]


def test_each_id_comes_with_a_step_and_the_last_has_a_finish(engine: TransformersEngine) -> None:
    steps = run(engine, PROMPTS[0], 5, ignore_eos=True)
    assert [len(step.ids) for step in steps] == [1] * 5
    assert [step.finish for step in steps] == [None] * 4 + ["length"]


def test_a_long_prompt_is_read_in_pieces(engine: TransformersEngine) -> None:
    prompt = [60 + index % 40 for index in range(120)]
    assert ids(run(engine, prompt, 4, ignore_eos=True)) == greedy(engine, prompt, 4)


def test_an_answer_ends_where_the_context_does(engine: TransformersEngine) -> None:
    steps = run(engine, [65] * 126, 50, ignore_eos=True)
    assert (len(ids(steps)), steps[-1].finish) == (2, "length")


def test_a_seed_gives_the_same_answer_again(engine: TransformersEngine) -> None:
    def say(seed: int) -> list[int]:
        return ids(run(engine, PROMPTS[0], temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True))

    assert say(1) == say(1)
    assert len({tuple(say(seed)) for seed in range(4)}) > 1


def test_choices_differ(engine: TransformersEngine) -> None:
    steps = run(engine, PROMPTS[0], n=4, temperature=2.0, seed=1, ignore_eos=True)
    mapping = {index: ids([step for step in steps if step.index == index]) for index in range(4)}
    assert len({tuple(each) for each in mapping.values()}) > 1


def test_log_probabilities_are_the_models_own(engine: TransformersEngine) -> None:
    (step,) = run(engine, PROMPTS[1], 1, logprobs=3, temperature=0.7, logit_bias={65: 5.0})
    (logprob,) = step.logprobs or []
    expected = logits(engine, PROMPTS[1]).log_softmax(-1)
    assert logprob.logprob == pytest.approx(float(expected[logprob.id]), abs=1e-4)
    assert [id_ for id_, _ in logprob.top] == expected.topk(3).indices.tolist()


def test_stop_ids_end_an_answer(engine: TransformersEngine) -> None:
    second = greedy(engine, PROMPTS[2], 2)[1]
    steps = run(engine, PROMPTS[2], 9, stop_token_ids=frozenset({second}), ignore_eos=True)
    assert (steps[-1].finish, steps[-1].stop_id) == ("stop", second)


def test_the_models_own_end_ends_an_answer_but_not_too_early(engine: TransformersEngine) -> None:
    (end,) = engine.tokenizer.end_ids
    steps = run(engine, PROMPTS[0], 9, logit_bias={end: 100.0}, min_tokens=3)
    assert len(ids(steps)) == 4
    assert (ids(steps)[-1], steps[-1].finish, steps[-1].stop_id) == (end, "stop", None)


def test_a_constraint_is_kept_to(engine: TransformersEngine) -> None:
    tokenizer = engine.tokenizer
    vocabulary = Vocabulary(tokenizer.pieces, tokenizer.special_ids, tokenizer.end_ids)
    ready = CompiledConstraint(Constraint.from_regex("(yes|no), [0-9]{3}").start(vocabulary))
    for index in range(3):
        steps = run(engine, PROMPTS[index], 20, constraint=ready, temperature=1.0)
        text = b"".join(tokenizer.pieces[id_] for id_ in ids(steps) if id_ not in tokenizer.end_ids)
        assert text[:2] in (b"ye", b"no")
        assert text[-3:].isdigit()
        assert steps[-1].finish == "stop"


class FailingConstraint:
    """A constraint that cannot go on."""

    source = None
    is_accepting = is_complete = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def new_matcher(self) -> "FailingConstraint":
        return self

    def mask(self, row: Any) -> None:
        raise self._error

    def accept(self, id_: int) -> None: ...


@pytest.mark.parametrize("error", [ConstraintFailed("broken"), RuntimeError("unforeseen")])
def test_one_answer_that_fails_does_not_harm_another(engine: TransformersEngine, error: Exception) -> None:
    async def main() -> None:
        good = asyncio.create_task(collect(engine, job(PROMPTS[0], ignore_eos=True)))
        with pytest.raises(EngineFailed):
            await collect(engine, job(PROMPTS[1], constraint=FailingConstraint(error)))
        assert ids(await good) == greedy(engine, PROMPTS[0], 8)
        await engine.check()

    asyncio.run(main())


def active(engine: TransformersEngine) -> int:
    scheduler = engine._manager.batch_processor.scheduler
    return len(scheduler.active_requests) + len(scheduler.waiting_requests)


def test_a_cancelled_answer_is_not_computed_any_more(engine: TransformersEngine) -> None:
    async def main() -> None:
        steps = engine.generate(job(PROMPTS[0], 100, n=3, ignore_eos=True))
        await anext(steps)
        await steps.aclose()
        # One answer from beginning to end: the others have left before its steps.
        await collect(engine, job(PROMPTS[1], 2, ignore_eos=True))
        await engine.check()
        assert active(engine) == 0
        assert engine.live == 0

    asyncio.run(main())


def test_one_continuation_can_be_cancelled(engine: TransformersEngine) -> None:
    async def main() -> None:
        steps: list[Step] = []
        done = asyncio.Event()

        def sink(step: Step) -> None:
            steps.append(step)
            if step.finish is not None:
                done.set()

        handle = engine.submit(job(PROMPTS[0], 40, n=2, ignore_eos=True), sink)
        handle.cancel(0)
        handle.cancel(0)
        await done.wait()
        assert [step.index for step in steps if step.finish] == [1]

    asyncio.run(main())


def test_a_sink_that_raises_is_dropped(engine: TransformersEngine) -> None:
    async def main() -> None:
        def sink(step: Step) -> None:
            raise RuntimeError

        engine.submit(job(PROMPTS[0], 40, ignore_eos=True), sink)
        assert ids(await collect(engine, job(PROMPTS[1], ignore_eos=True))) == greedy(engine, PROMPTS[1], 8)
        assert engine.live == 0

    asyncio.run(main())


def test_a_failure_of_the_model_reaches_everybody(
    fresh: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access at 0xdeadbeef")

    async def main() -> None:
        monkeypatch.setattr(fresh._loaded.model, "forward", fail)
        asked = [collect(fresh, job(prompt)) for prompt in PROMPTS]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, EngineFailed) and "0x" not in error.message for error in failed)
        with pytest.raises(EngineFailed):
            await fresh.check()
        with pytest.raises(EngineFailed):
            fresh.submit(job(PROMPTS[0]), lambda step: None)

    asyncio.run(main())


def test_stopping_aborts_what_runs(fresh: TransformersEngine) -> None:
    async def main() -> None:
        steps = fresh.generate(job(PROMPTS[0], 120, ignore_eos=True))
        await anext(steps)
        await fresh.stop()
        assert [step.finish async for step in steps][-1] == "abort"
        with pytest.raises(Unavailable):
            await fresh.check()

    asyncio.run(main())


def test_weights_can_be_changed_between_steps(fresh: TransformersEngine) -> None:
    async def main() -> None:
        before = await collect(fresh, job(PROMPTS[2], ignore_eos=True))
        await fresh.pause()
        waiting = asyncio.create_task(collect(fresh, job(PROMPTS[2], ignore_eos=True)))
        with torch.no_grad():
            fresh._loaded.model.lm_head.weight.neg_()
        assert not waiting.done()
        await fresh.resume("2")
        after = await waiting
        assert ids(after) == greedy(fresh, PROMPTS[2], 8) != ids(before)
        assert {step.weight_version for step in before} == {None}
        assert {step.weight_version for step in after} == {"2"}

    asyncio.run(main())


def test_embeddings_are_means_of_the_last_states(engine: TransformersEngine) -> None:
    async def main() -> list[list[float]]:
        busy = asyncio.create_task(collect(engine, job(PROMPTS[0], 20, ignore_eos=True)))
        vectors = await engine.embed(PROMPTS)
        await busy
        return vectors

    vectors = asyncio.run(main())
    with torch.no_grad():
        states = engine._loaded.model.model(input_ids=torch.tensor([PROMPTS[1]])).last_hidden_state[0]
    expected = states.mean(0) / states.mean(0).norm()
    assert np.allclose(vectors[1], expected.numpy(), atol=1e-5)


def test_an_encoder_embeds_and_does_not_write(bert: Path) -> None:
    engine = TransformersEngine.open(str(bert), OPTIONS)
    with dragoman.background(engine, store="none") as url:
        vector = httpx.post(url + "/v1/embeddings", json={"input": "the quick fox"}).json()
        refused = httpx.post(url + "/v1/completions", json={"prompt": "the"})
        paused = httpx.post(url + "/v1/engine/pause")
    embedding = vector["data"][0]["embedding"]
    assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-4)
    with torch.no_grad():
        framed = torch.tensor([[1, 3, 4, 7, 2]])
        states = engine._loaded.model(input_ids=framed).last_hidden_state[0]
    assert np.allclose(embedding, (states.mean(0) / states.mean(0).norm()).numpy(), atol=1e-4)
    assert (refused.status_code, paused.status_code) == (400, 400)


def test_it_is_served(fresh: TransformersEngine) -> None:
    body = {"prompt": "the quick", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True}
    with dragoman.background(fresh, store="none") as url:
        lines = httpx.post(url + "/v1/completions", json=body).text.splitlines()
        refused = httpx.post(url + "/v1/completions", json={"prompt": "a", "prompt_logprobs": 1})
        ready = httpx.get(url + "/ready")
    assert "data: [DONE]" in lines
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert ready.status_code == 200


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot load"):
        TransformersEngine.open(str(tmp_path), OPTIONS)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "MLA"),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "linear_attention"),
    ],
)
def test_models_that_cannot_be_batched_are_refused_when_they_are_opened(
    tmp_path: Path, config: Any, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=f"does not support .*{reason}.* try the engine vllm"):
        TransformersEngine.open(str(tmp_path), OPTIONS)


def test_a_prompt_that_is_too_long_to_embed_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(BadRequest):
        asyncio.run(engine.embed([[65] * 200]))


def test_what_is_chosen_together_is_what_is_chosen_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all rows without rules of their own are chosen from where they are."""

    async def main() -> list[list[Step]]:
        kinds: list[dict[str, Any]] = [
            {},
            {"logprobs": 2},
            {"temperature": 0.8, "top_p": 0.9, "seed": 1},
            {"temperature": 1.0, "min_p": 0.1, "seed": 2, "logprobs": 1},
            {"temperature": 1.0, "seed": 3, "logit_bias": {65: 2.0}},
        ]
        jobs = [job(PROMPTS[0], ignore_eos=True, **kind) for kind in kinds]
        return list(await asyncio.gather(*(collect(engine, each) for each in jobs)))

    alone = asyncio.run(main())
    monkeypatch.setattr(TransformersContinuation, "in_company", lambda run, drawing: run.over or run._plain)
    together = asyncio.run(main())
    assert [ids(steps) for steps in together] == [ids(steps) for steps in alone]
    for one, other in zip(together, alone, strict=True):
        for step, expected in zip(one, other, strict=True):
            assert [each.id for each in step.logprobs or []] == [each.id for each in expected.logprobs or []]


def test_weights_are_not_unpickled(llama: Path, tmp_path: Path) -> None:
    """Whatever a file of pickles says runs before anybody can look at it."""
    import torch
    from safetensors.torch import load_file

    for file in llama.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(llama / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="safetensors"):
        TransformersEngine.open(str(tmp_path), OPTIONS)
