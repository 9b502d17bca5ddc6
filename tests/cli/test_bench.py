import asyncio
import json

import pytest

from dragoman.cli import main
from dragoman.cli.load import load, prompt_of, quantile
from tests.cli.conftest import Fake

Capture = pytest.CaptureFixture[str]


def test_a_table_for_people(fake: Fake, capsys: Capture) -> None:
    assert main(["bench", "--url", fake.url, "--streams", "1,3", "--tokens", "4", "--rounds", "2"]) == 0
    head, one, three = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["streams", "tok/s"]
    assert one.split()[0] == "1"
    assert three.split()[0] == "3"
    assert one.endswith(" 8      14       6       0")
    assert all(body["ignore_eos"] for body in fake.asked)


def test_json_has_all_figures(fake: Fake, capsys: Capture) -> None:
    flags = ["--streams", "2", "--tokens", "3", "--api", "completions", "--extra", '{"top_k": 1}', "--json"]
    assert main(["bench", "--url", fake.url, "--prompt-tokens", "5", *flags]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["streams"], result["requests"], result["tokens"], result["errors"]) == (2, 2, 6, 0)
    assert (result["prompt_tokens"], result["cached_tokens"]) == (14, 6)
    assert result["tokens_per_s"] > 0
    assert result["ttft_p99_ms"] >= result["ttft_p50_ms"] > 0
    body = fake.asked[-1]
    assert (body["max_tokens"], body["top_k"], len(body["prompt"].split())) == (3, 1, 5)


@pytest.mark.parametrize(("tells_usage", "tokens"), [(True, 4), (False, 2)])
def test_tokens_are_those_of_the_usage_and_events_only_without(
    fake: Fake, capsys: Capture, tells_usage: bool, tokens: int
) -> None:
    fake.tells_usage, fake.joined = tells_usage, 2
    assert main(["bench", "--url", fake.url, "--streams", "1", "--tokens", "4", "--json"]) == 0
    captured = capsys.readouterr()
    (result,) = json.loads(captured.out)
    assert (result["tokens"], result["counted"]) == (tokens, tells_usage)
    assert ("tokens are counted as events" in captured.err) != tells_usage


def test_ignore_eos_is_left_out_where_it_is_refused(fake: Fake) -> None:
    fake.refuses = {"ignore_eos"}
    result = asyncio.run(load(fake.url, "m", 1, 4))
    assert result.errors == 0
    assert "ignore_eos" not in fake.asked[-1]


def test_errors_are_counted_and_told(fake: Fake, capsys: Capture) -> None:
    fake.breaks_after = 2
    assert main(["bench", "--url", fake.url, "--streams", "2", "--tokens", "4"]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].endswith(" 2")
    assert "2 streams: the server closed the connection" in captured.err


def test_a_server_that_refuses_all_is_told_at_once(fake: Fake, capsys: Capture) -> None:
    fake.refuses = {"messages"}
    assert main(["bench", "--url", fake.url]) == 1
    assert "HTTP 400: Unknown field messages." in capsys.readouterr().err


def test_nobody_answers(capsys: Capture) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--model", "m"]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_prompts_share_what_they_should() -> None:
    one, two = prompt_of(9, 4, 1).split(), prompt_of(9, 4, 2).split()
    assert len(one) == len(two) == 9
    assert one[:4] == two[:4]
    assert one != two
    assert prompt_of(9, 4, 1).split() == one


def test_quantiles() -> None:
    assert quantile([], 0.5) == 0
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99
