"""What /metrics says, as Prometheus reads it."""

import shutil
import subprocess
from functools import cache

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.engines.supervisor import SupervisedEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.engines.local.paged import PagedDesk
from tests.engines.local.support import Desk
from tests.http.conftest import Serve
from tests.support.http import HELLO, get, post, stream

CHAT = "/v1/chat/completions"
SAMPLES = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Busy(ScriptedEngine):
    kv_usage = 0.25


def read(text: str) -> SAMPLES:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for each in families for one in each.samples}


@cache
def exposition(names: str = "vllm") -> str:
    """Of a server that has answered one chat, a stream, and a request that was wrong."""
    settings = Settings(port=0, store="memory", metrics_names=names)  # type: ignore[arg-type]
    with background(SupervisedEngine(lambda: Busy(say("hello"))), settings) as url:
        post(url, CHAT, HELLO)
        stream(url, CHAT, {**HELLO, "max_tokens": 2})
        post(url, CHAT, {"messages": 1})
        return get(url, "/metrics").text


def figure(name: str, **labels: str) -> float:
    return read(exposition())[name, frozenset(labels.items())]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("time_to_first_token_seconds", 2),
        ("queue_seconds", 2),
        ("prefill_seconds", 2),
        ("answer_seconds", 2),
        ("request_prompt_tokens", 2),
        ("request_generation_tokens", 2),
    ],
)
def test_histograms_count_answers_by_model(name: str, count: int) -> None:
    assert figure(f"dragoman_{name}_count", model="scripted") == count
    assert figure(f"dragoman_{name}_bucket", model="scripted", le="+Inf") == count


def test_every_request_has_its_time() -> None:
    assert figure("dragoman_request_seconds_count") == 3


def test_ends_are_counted_by_reason() -> None:
    assert figure("dragoman_finishes_total", model="scripted", reason="stop") == 1
    assert figure("dragoman_finishes_total", model="scripted", reason="length") == 1
    assert figure("vllm:request_success_total", model_name="scripted", finished_reason="abort") == 0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("dragoman_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("dragoman_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
        ("dragoman_cached_tokens_total", "vllm:prefix_cache_hits_total"),
        ("dragoman_generation_tokens_total", "vllm:generation_tokens_total"),
        ("dragoman_answers_running", "vllm:num_requests_running"),
        ("dragoman_answers_waiting", "vllm:num_requests_waiting"),
        ("dragoman_kv_usage_ratio", "vllm:kv_cache_usage_perc"),
        ("dragoman_time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
        ("dragoman_inter_token_seconds_sum", "vllm:inter_token_latency_seconds_sum"),
        ("dragoman_answer_seconds_sum", "vllm:e2e_request_latency_seconds_sum"),
        ("dragoman_queue_seconds_sum", "vllm:request_queue_time_seconds_sum"),
    ],
)
def test_vllms_names_say_the_same(ours: str, theirs: str) -> None:
    assert figure(ours, model="scripted") == figure(theirs, model_name="scripted")


def test_without_the_switch_there_are_no_names_of_vllm() -> None:
    assert "vllm" not in exposition("dragoman")


def test_the_process_is_described() -> None:
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert figure(f"process_{name}") > 0


def test_a_model_that_was_not_asked_yet_has_figures(serve: Serve) -> None:
    seen = read(get(serve(ScriptedEngine(say("hi"))), "/metrics").text)
    model = frozenset({("model", "scripted")})
    assert seen["dragoman_generation_tokens_total", model] == 0
    # An engine that does not say how much of its memory is in use has no such figure.
    assert ("dragoman_kv_usage_ratio", model) not in seen


def test_what_answers_use_of_the_key_value_memory() -> None:
    paged, slots = PagedDesk(slots=2, pages=16, page=4), Desk(slots=2, context=32)
    for desk in (paged, slots):
        assert desk.scheduler.kv_usage == 0
        desk.ask(list(range(8)), 2)
        desk.step()
    assert paged.scheduler.kv_usage == 2 / 16
    assert slots.scheduler.kv_usage == 8 / 64
    for desk in (paged, slots):
        desk.run()
        # What is kept for the next one makes way.
        assert desk.scheduler.kv_usage == 0


def test_promtool_finds_nothing_wrong() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("METRICS WERE NOT CHECKED BY PROMTOOL: it comes with Debian's package prometheus")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition("dragoman"), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
