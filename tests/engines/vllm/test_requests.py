"""From jobs to requests, with an input processor that counts what it is asked. vLLM is not needed."""

from types import SimpleNamespace
from typing import Any

from dragoman.engines.protocol import ModelCard
from dragoman.engines.steps import seed_of
from dragoman.engines.vllm.requests import MOST_KEPT, RequestBuilder, prompt_of
from dragoman.types import Job, Sampling

CONTEXT, VOCABULARY = 100, 50


class Inputs:
    """What vLLM does with a request: it completes the parameters."""

    def __init__(self) -> None:
        self.asked = 0

    def process_inputs(self, id: str, prompt: Any, params: Any, *, supported_tasks: Any, **how: Any) -> Any:
        self.asked += 1
        return SimpleNamespace(
            request_id=id,
            prompt_token_ids=prompt["prompt_token_ids"],
            cache_salt=prompt.get("cache_salt"),
            sampling_params=SimpleNamespace(**vars(params), completed=True),
            **how,
        )


class Model:
    card = ModelCard(name="tiny", max_model_len=CONTEXT)
    tokenizer = SimpleNamespace(pieces=[b""] * VOCABULARY)

    def sampling_params(self, job: Job) -> Any:
        asked = job.sampling
        return SimpleNamespace(max_tokens=asked.max_tokens, temperature=asked.temperature, seed=asked.seed)

    def prompt(self, job: Job) -> Any:
        return prompt_of(job.prompt, job.cache_salt)

    def adapter(self, job: Job) -> Any:
        return job.adapter


def made() -> tuple[RequestBuilder, Inputs]:
    inputs = Inputs()
    return RequestBuilder(SimpleNamespace(input_processor=inputs), Model()), inputs  # type: ignore[arg-type]


def job(prompt: tuple[int, ...] = (1, 2), max_tokens: int = 9, **more: Any) -> Job:
    sampling = {key: more.pop(key) for key in list(more) if key in Sampling.__struct_fields__}
    return Job(id="a", prompt=prompt, sampling=Sampling(max_tokens=max_tokens, **sampling), **more)


def test_what_is_asked_for_again_is_not_completed_again() -> None:
    requests, inputs = made()
    first = requests.of(job((1, 2), 9))[0]
    again = requests.of(job((3, 4, 5), 7, cache_salt="s", priority=2))[0]
    assert inputs.asked == 1
    assert (first.prompt_token_ids, first.sampling_params.max_tokens) == ([1, 2], 9)
    assert (again.prompt_token_ids, again.sampling_params.max_tokens) == ([3, 4, 5], 7)
    assert (again.cache_salt, again.priority, again.sampling_params.completed) == ("s", 2, True)
    # Nothing of one job stays for the next.
    assert requests.of(job((6,), 9))[0].cache_salt is None


def test_what_differs_is_completed_by_itself() -> None:
    requests, inputs = made()
    others: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.5},
        {"seed": 1},
        {"logit_bias": {3: 1.0}},
        {"adapters": (("poet", 1.0),)},
    )
    for other in others:
        requests.of(job(**other))
    assert inputs.asked == len(others)
    assert requests.of(job(adapters=(("poet", 1.0),)))[0].lora_request == "poet"
    assert requests.of(job())[0].lora_request is None
    assert inputs.asked == len(others)


def test_what_vllm_may_refuse_is_shown_to_it() -> None:
    requests, inputs = made()
    requests.of(job())
    for prompt in ((), (1,) * CONTEXT, (VOCABULARY,), (-1,)):
        before = inputs.asked
        requests.of(job(prompt))
        assert inputs.asked == before + 1
    before = inputs.asked
    requests.of(job(max_tokens=0))
    requests.of(job(min_tokens=5))
    requests.of(job(min_tokens=5))
    assert inputs.asked == before + 3


def test_names_differ_even_where_jobs_are_named_alike() -> None:
    requests, _ = made()
    names = [request.request_id for _ in range(3) for request in requests.of(job(n=2))]
    assert len(set(names)) == 6


def test_every_continuation_has_a_seed_of_its_own() -> None:
    requests, _ = made()
    for _ in range(2):
        seeds = [request.sampling_params.seed for request in requests.of(job(n=3, seed=5))]
        assert seeds == [seed_of(5, index) for index in range(3)]


def test_no_more_is_kept_than_there_is_room_for() -> None:
    requests, inputs = made()
    for seed in range(MOST_KEPT + 1):
        requests.of(job(seed=seed))
    requests.of(job(seed=MOST_KEPT))
    assert inputs.asked == MOST_KEPT + 1
    requests.of(job(seed=0))
    assert inputs.asked == MOST_KEPT + 2
