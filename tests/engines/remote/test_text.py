"""Upstreams that give text: that is the answer, and nobody is given ids of it."""

import pytest
from msgspec.structs import replace

from dragoman.engines.remote import RemoteEngine
from dragoman.engines.scripted import CHATML, ByteTokenizer
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job, Sampling, Step, TextStep
from tests.cli.conftest import WORDS, Fake, fake
from tests.engines.remote.support import QUICK, ids_of, job_of, run, steps_of
from tests.support.http import HELLO, post, refusal

__all__ = ["fake"]

ALL = "".join(WORDS)


@pytest.fixture(autouse=True)
def stranger(fake: Fake) -> None:
    fake.is_dragoman = False


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps if isinstance(step, TextStep))


def test_the_text_is_the_answer(fake: Fake) -> None:
    steps = run([fake.url], lambda engine: steps_of(engine, job_of([72, 105])))
    assert (text_of(steps), ids_of(steps)) == (ALL, [])
    assert (steps[-1].finish, steps[-1].cached_tokens) == ("stop", 3)
    assert fake.asked[-1]["prompt"] == [72, 105]


def test_a_prompt_is_sent_as_text_where_ids_are_refused(fake: Fake) -> None:
    fake.refuses = {"return_token_ids"}
    run([fake.url], lambda engine: steps_of(engine, replace(job_of([72, 105]), text="Hi")))
    assert fake.asked[-1]["prompt"] == "Hi"


def test_without_a_tokenizer_all_is_text(fake: Fake) -> None:
    engine = RemoteEngine.open([fake.url], None, QUICK)
    assert (engine.card.has_tokenizer, engine.card.wants_prompt_text, engine.card.returns_ids) == (
        False,
        True,
        False,
    )
    with background(engine, Settings(port=0, store="none", shutdown_grace=0), template=CHATML) as url:
        answer = post(url, "/v1/chat/completions", HELLO).json()
        refused = post(url, "/v1/completions", {"prompt": [1]})
    assert answer["choices"][0]["message"]["content"] == ALL
    assert fake.asked[-1]["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert refusal(refused) == (400, "prompt")


def test_only_what_every_server_knows_is_sent(fake: Fake) -> None:
    run([fake.url], lambda engine: steps_of(engine, job_of()))
    assert fake.asked[-1].keys() == {
        *("model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        *("stream", "stream_options"),
    }


def test_a_first_token_of_the_prompt_is_left_to_the_server(fake: Fake) -> None:
    fake.refuses = {"return_token_ids"}
    tokenizer = ByteTokenizer()
    tokenizer.add_bos, tokenizer.bos_id = True, 1
    engine = RemoteEngine.open([fake.url], tokenizer, QUICK)
    from dragoman.engines.remote.engine import request_of

    traits = engine.upstreams[0].traits
    assert traits is not None
    job = Job(id="", prompt=(1, 72, 105), text="\x01Hi", sampling=Sampling(max_tokens=1))
    assert request_of(job, traits, tokenizer).body["prompt"] == "Hi"


def test_made_ids_are_marked_and_not_given_out(fake: Fake) -> None:
    engine = RemoteEngine.open([fake.url], ByteTokenizer(), QUICK)
    assert not engine.card.returns_ids
    assert engine.card.details["ids"] == "counted"
    with background(engine, Settings(port=0, store="none", shutdown_grace=0), template=CHATML) as url:
        answer = post(url, "/v1/chat/completions", HELLO).json()
        refused = [
            post(url, "/v1/chat/completions", {**HELLO, field: value}).json()["error"]["param"]
            for field, value in (("return_token_ids", True), ("logprobs", True), ("top_k", 5))
        ]
    assert answer["choices"][0]["message"]["content"] == ALL
    assert refused == ["return_token_ids", "logprobs", "top_k"]
