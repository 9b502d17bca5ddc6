"""The lines of a batch: each is asked until it has an answer, and what is done is not done again."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from dragoman.api.batches import LineReply, LineRequest, OpenAILineCodec
from dragoman.batches.line_processor import LineProcessor
from dragoman.turns.queue import background_cancel
from tests.batches.support import echo, jsonl, line, read_lines


async def do(work: Callable[[], object]) -> object:
    return await asyncio.to_thread(work)


def run_of(
    folder: Path, answer: Callable[[LineRequest], Awaitable[LineReply]] = echo, most: int = 4
) -> LineProcessor:
    paths = folder / "input", folder / "output", folder / "errors"
    return LineProcessor(*paths, OpenAILineCodec(), answer, lambda: most, do)  # type: ignore[arg-type]


def ids(path: Path) -> list[str]:
    return [one["custom_id"] for one in read_lines(path.read_bytes())] if path.exists() else []


def test_every_line_is_in_one_of_the_two_files(tmp_path: Path) -> None:
    lines = [line(str(number), "bad" if number % 10 == 0 else "ok") for number in range(100)]
    (tmp_path / "input").write_bytes(jsonl(lines))
    run = run_of(tmp_path)
    asyncio.run(run.run())
    assert sorted(map(int, ids(tmp_path / "output"))) == [n for n in range(100) if n % 10]
    assert sorted(map(int, ids(tmp_path / "errors"))) == list(range(0, 100, 10))
    assert (run.counts.completed, run.counts.failed) == (90, 10)
    assert (run.counts.usage.prompt_tokens, run.counts.usage.completion_tokens) == (180, 90)


def test_what_is_done_is_not_asked_again_and_half_a_line_is(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(jsonl(line(str(number)) for number in range(20)))
    asyncio.run(run_of(tmp_path).run())
    output = tmp_path / "output"
    kept = b"".join(output.read_bytes().splitlines(keepends=True)[:12])
    output.write_bytes(kept + b'{"id": "batch_req_1", "custom')
    before = ids_in(kept)
    asked: list[str] = []

    async def answer(line: LineRequest) -> LineReply:
        asked.append(line.custom_id)
        return await echo(line)

    again = run_of(tmp_path, answer)
    asyncio.run(again.run())
    assert Counter(ids(output)) == Counter(str(number) for number in range(20))
    assert set(asked) == {str(number) for number in range(20)} - before
    assert output.read_bytes().startswith(kept)
    assert again.counts.completed == 20 and again.counts.usage.prompt_tokens == 40


def ids_in(text: bytes) -> set[str]:
    return {one["custom_id"] for one in read_lines(text)}


def test_answers_are_written_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(jsonl(line(str(number)) for number in range(4)))
    pauses = {"0": 0.06, "1": 0.0, "2": 0.12, "3": 0.03}

    async def answer(line: LineRequest) -> LineReply:
        await asyncio.sleep(pauses[line.custom_id])
        return await echo(line)

    asyncio.run(run_of(tmp_path, answer).run())
    assert ids(tmp_path / "output") == ["1", "3", "0", "2"]


def test_no_more_lines_are_at_work_than_may_be(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(jsonl(line(str(number)) for number in range(50)))
    at_work = [0, 0]

    async def answer(line: LineRequest) -> LineReply:
        at_work[0] += 1
        at_work[1] = max(at_work)
        await asyncio.sleep(0.001)
        at_work[0] -= 1
        return await echo(line)

    asyncio.run(run_of(tmp_path, answer, most=3).run())
    assert at_work == [0, 3]


def test_trouble_of_the_server_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(jsonl(line(str(number)) for number in range(3)))
    troubles = [503, 429]

    async def answer(line: LineRequest) -> LineReply:
        return LineReply(troubles.pop(), "req", b"{}") if troubles else await echo(line)

    asyncio.run(run_of(tmp_path, answer, most=1).run())
    assert sorted(ids(tmp_path / "output")) == ["0", "1", "2"]
    assert ids(tmp_path / "errors") == []


def test_a_line_whose_place_is_needed_is_asked_again(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(jsonl(line(str(number)) for number in range(5)))
    pressed: list[str] = []

    async def answer(line: LineRequest) -> LineReply:
        step_back = background_cancel.get()
        assert step_back is not None
        if line.custom_id == "3" and not pressed:
            pressed.append(line.custom_id)
            step_back()
            await asyncio.sleep(60)
        return await echo(line)

    asyncio.run(run_of(tmp_path, answer).run())
    assert sorted(ids(tmp_path / "output")) == ["0", "1", "2", "3", "4"]
    assert background_cancel.get() is None
