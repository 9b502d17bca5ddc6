"""What engines are asked, each in its own words."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.engines.asyncllm import AsyncLLMEngine, GenerateRequest, form_of
from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.errors import SettingsError
from dragoman.media import Media, MediaSpan
from dragoman.types import ConstraintFormat, ConstraintSource, Job, Matcher, Sampling
from tests.support import fake_asyncllm, fake_sglang
from tests.support.fake_asyncllm import DuckEngine, FakeAsyncLLM
from tests.support.fake_sglang import FakeSglang
from tests.support.tokenizers import byte_level

FULL = Sampling(
    max_tokens=9,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias={5: -1.0},
    stop_token_ids=frozenset({4, 3}),
    min_tokens=2,
    ignore_eos=True,
    seed=6,
)
SPELLED = {
    "max_new_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -1.0},
    "stop_token_ids": [3, 4],
    "min_new_tokens": 2,
    "ignore_eos": True,
}


class SourceConstraint:
    def __init__(self, source: ConstraintSource) -> None:
        self.source = source

    def new_matcher(self) -> Matcher:
        raise NotImplementedError


def job(sampling: Sampling | None = None, **fields: Any) -> Job:
    return Job(id="job", prompt=(1, 2), sampling=sampling or Sampling(max_tokens=9), **fields)


def manager(**server_args: Any) -> fake_sglang.Manager:
    return FakeSglang(**server_args).tokenizer_manager


@pytest.mark.parametrize(
    ("engine", "cls", "seed"),
    [
        (FakeAsyncLLM(), fake_asyncllm.GenerateReqInput, "seed"),
        (manager(), fake_sglang.GenerateReqInput, "sampling_seed"),
        (DuckEngine(), GenerateRequest, "seed"),
    ],
)
def test_each_engine_is_asked_in_its_own_class(engine: Any, cls: Any, seed: str) -> None:
    reply = form_of(engine).request(job(FULL))
    assert isinstance(reply, cls)
    assert (reply.rid, reply.input_ids, reply.stream) == ("job.", [1, 2], True)
    assert reply.sampling_params == {**SPELLED, seed: 6}


def test_an_engine_may_name_its_class() -> None:
    class NamedEngine(DuckEngine):
        request_class = fake_sglang.GenerateReqInput

    assert isinstance(form_of(NamedEngine()).request(job()), fake_sglang.GenerateReqInput)


def test_annotations_that_cannot_be_looked_up_are_passed_over() -> None:
    class UnknownEngine:
        async def generate_request(self, obj: "NotImported") -> None:  # type: ignore[name-defined]  # noqa: F821
            raise NotImplementedError

    assert isinstance(form_of(UnknownEngine()).request(job()), GenerateRequest)


def test_only_names_that_the_engine_knows_are_sent() -> None:
    """Another name would be an exception in the engine: its parameters are made by name."""
    sent = form_of(manager()).request(job()).sampling_params
    assert sent.keys() <= set(fake_sglang.SamplingParams.__struct_fields__)
    assert sent["top_k"] == -1


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [
        (Sampling(max_tokens=1), (False, 0, -1)),
        (Sampling(max_tokens=1, logprobs=0), (True, 0, -1)),
        (Sampling(max_tokens=1, logprobs=3), (True, 3, -1)),
        (Sampling(max_tokens=1, logprobs=1, prompt_logprobs=2), (True, 2, 0)),
    ],
)
def test_log_probabilities_are_asked_for(sampling: Sampling, asked: tuple[bool, int, int]) -> None:
    reply = form_of(FakeAsyncLLM()).request(job(sampling))
    assert (reply.return_logprob, reply.top_logprobs_num, reply.logprob_start_len) == asked


@pytest.mark.parametrize(
    ("form", "field", "text"),
    [
        ("json_schema", "json_schema", "X"),
        ("regex", "regex", "X"),
        ("gbnf", "ebnf", "X"),
        ("lark", "ebnf", "%llguidance {}\nX"),
        ("structural_tag", "structural_tag", "X"),
    ],
)
def test_a_constraint_is_handed_over(form: ConstraintFormat, field: str, text: str) -> None:
    reply = form_of(manager()).request(job(constraint=SourceConstraint(ConstraintSource(form, "X"))))
    assert reply.sampling_params[field] == text
    assert reply.require_reasoning is False


def test_a_constraint_that_waits_for_reasoning_says_so() -> None:
    form = form_of(manager(reasoning_parser="qwen3"))
    reply = form.request(
        job(constraint=SourceConstraint(ConstraintSource("regex", "X", after_reasoning=True)))
    )
    assert form.skips_reasoning
    assert reply.require_reasoning is True
    assert not form_of(manager()).skips_reasoning


def test_adapters_salts_and_priorities() -> None:
    reply = form_of(manager()).request(job(adapters=(("poet", 1.0),), priority=3, cache_salt="s"))
    assert (reply.lora_path, reply.priority, reply.extra_key) == ("poet", -3, "s")
    low_first = form_of(manager(schedule_low_priority_values_first=True)).request(job(priority=3))
    assert low_first.priority == 3


def test_a_prefix_that_may_not_be_reused_has_a_salt_of_its_own() -> None:
    assert form_of(manager()).request(job(reuse_prefix=False)).extra_key == "job"


def test_what_there_is_no_name_for_is_not_supported() -> None:
    never = {"typical_p", "bad_words", "allowed_token_ids"}
    assert form_of(manager()).unsupported == never
    assert form_of(manager(enable_priority_scheduling=False)).unsupported == never | {"priority"}
    assert form_of(FakeAsyncLLM()).unsupported == never | {"priority", "cache_salt", "reuse_prefix"}


@pytest.mark.parametrize(
    ("backend", "sources"),
    [
        (None, {"json_schema", "regex", "gbnf", "structural_tag"}),
        ("xgrammar", {"json_schema", "regex", "gbnf", "structural_tag"}),
        ("llguidance", {"lark"}),
        ("outlines", {"json_schema", "regex"}),
        ("none", set()),
    ],
)
def test_constraints_are_those_that_the_backend_reads(backend: str | None, sources: set[str]) -> None:
    assert set(AsyncLLMEngine(FakeSglang(grammar_backend=backend)).card.constraint_formats) == sources


@pytest.mark.parametrize("engine", [FakeAsyncLLM(), FakeSglang()])
def test_the_card_is_what_the_engine_shows(engine: Any) -> None:
    card = AsyncLLMEngine(engine).card
    assert (card.name, card.max_model_len, list(card.templates)) == ("fake", 4096, ["default"])
    own = AsyncLLMEngine(engine, chat_template="T", model_name="mine", max_model_len=5).card
    assert (own.name, own.max_model_len, own.templates) == ("mine", 5, {"default": "T"})


def test_a_tokenizer_of_hugging_face_is_taken_apart() -> None:
    engine = FakeAsyncLLM()
    engine.tokenizer = byte_level()
    tokenizer = AsyncLLMEngine(engine).tokenizer
    assert isinstance(tokenizer, HfTokenizer)
    assert b"".join(tokenizer.pieces[id_] for id_ in tokenizer.encode("naïve")).decode() == "naïve"


def test_a_tokenizer_may_be_asked_for() -> None:
    engine = FakeAsyncLLM()
    kept, engine.tokenizer = engine.tokenizer, None
    engine.get_tokenizer = lambda: kept  # type: ignore[attr-defined]
    assert AsyncLLMEngine(engine).tokenizer is kept


@pytest.mark.parametrize("engine", [object(), SimpleNamespace(generate_request=None)])
def test_what_is_missing_is_named(engine: Any) -> None:
    with pytest.raises(SettingsError, match="generate_request"):
        AsyncLLMEngine(engine)


def test_adapters_need_an_engine_that_has_them() -> None:
    assert AsyncLLMEngine(FakeSglang(), adapters=["poet"]).card.adapters == ("poet",)
    with pytest.raises(SettingsError, match="lora_path"):
        AsyncLLMEngine(FakeAsyncLLM(), adapters=["poet"])


def test_media_are_handed_over_where_the_engine_has_names_for_them() -> None:
    @dataclass
    class Sees(fake_sglang.GenerateReqInput):
        image_data: list[str] | None = None

    engine = FakeSglang()
    engine.tokenizer_manager.request_class = Sees  # type: ignore[attr-defined]
    blind = AsyncLLMEngine(engine, HfTokenizer(byte_level()), max_model_len=99)
    engine.tokenizer_manager.mm_processor = object()  # type: ignore[attr-defined]
    seeing = AsyncLLMEngine(engine, HfTokenizer(byte_level()), max_model_len=99)
    assert (blind.card.modalities, seeing.card.modalities) == (frozenset(), frozenset({"image"}))
    picture = Media(kind="image", format="png", data=b"abc", digest="d")
    assert len(seeing.media_token_ids(picture)) == 1
    reply = seeing._form.request(job(media=(MediaSpan(picture, 1, 1),)))
    assert reply.image_data == ["data:image/png;base64,YWJj"]
