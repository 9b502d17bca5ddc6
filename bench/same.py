"""Whether the same question gets the same answer: alone or in company, its prefix known or not, with guesses.

Answers of the embedded engine, over each runner, are compared with those that a question gets by itself from
an engine that knows nothing of its prompt and guesses nothing. Half of the questions are second turns, whose
prompt goes on from an answer; some of the others come after up to 600 words.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count, product
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bench import machine
from bench.errors import BenchError, told
from bench.runner_texts import TEXT, prompts
from bench.tables import Table, keep
from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.options import RunnerName
from dragoman.types import Job, Sampling

RUNNERS: tuple[RunnerName, ...] = ("openvino", "llamacpp")
COMPANY = (0, 7, 31)
GUESSES = 7
_CONTEXT = 2048
_salts = count()


class Question(Struct, frozen=True):
    prompt: tuple[int, ...]
    before: tuple[int, ...]
    """What is asked first, where the prefix is to be known."""


class GeneratedAnswer(Struct, frozen=True):
    ids: list[int]
    logprobs: list[float]


class Way(Struct, frozen=True):
    runner: RunnerName
    guesses: int
    company: int
    """Others that are asked at the same time."""
    known: bool


class Equal(Struct, frozen=True):
    way: Way
    greedy: int
    seeded: int
    """Answers with the same ids."""
    middle: float
    most: float
    """Differences of log probabilities, as far as ids are the same."""


def samplings(tokens: int) -> tuple[Sampling, Sampling]:
    """At temperature 0, and with a seed."""
    greedy = Sampling(max_tokens=tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    return greedy, Sampling(
        max_tokens=tokens, temperature=0.8, top_p=0.95, seed=7, logprobs=0, ignore_eos=True
    )


async def questions(engine: LocalEngine, number: int, tokens: int) -> list[Question]:
    """As many as asked for."""
    text = engine.tokenizer.encode(TEXT)
    firsts = []
    for index, words in enumerate(prompts(-(-number // 2))):
        lead = text[: (index * 53) % 700] if index % 3 == 0 else []
        firsts.append(tuple(lead + engine.tokenizer.encode(words)))
    result = [Question(first, (*first[: len(first) * 2 // 3], 1)) for first in firsts]
    answers = await ask(engine, result, samplings(tokens)[0], company=0, known=False)
    turn = engine.tokenizer.encode("\nAnd what happened after that?")
    result += [
        Question((*first, *answer.ids, *turn), first) for first, answer in zip(firsts, answers, strict=True)
    ]
    return result[:number]


async def ask(
    engine: LocalEngine, asked: Sequence[Question], sampling: Sampling, *, company: int, known: bool
) -> list[GeneratedAnswer]:
    """The answers, `company` + 1 at a time. Nothing is known but what each has asked before."""
    generated_answers = []
    for group in _groups(asked, company + 1):
        salts = [str(next(_salts)) for _ in group]
        if known:
            greedy = samplings(sampling.max_tokens)[0]
            before = [
                _say(engine, each.before, greedy, salt) for each, salt in zip(group, salts, strict=True)
            ]
            await asyncio.gather(*before)
        answers = [_say(engine, each.prompt, sampling, salt) for each, salt in zip(group, salts, strict=True)]
        generated_answers += await asyncio.gather(*answers)
    return generated_answers


async def _say(engine: LocalEngine, prompt: Sequence[int], sampling: Sampling, salt: str) -> GeneratedAnswer:
    job = Job(id="same", prompt=tuple(prompt), sampling=sampling, cache_salt=salt)
    answer = GeneratedAnswer([], [])
    async for step in engine.generate(job):
        if step.error is not None:
            raise step.error
        answer.ids.extend(step.ids)
        answer.logprobs.extend(entry.logprob for entry in step.logprobs or ())
    return answer


def _groups(asked: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    for start in range(0, len(asked), size):
        yield asked[start : start + size]


def equal(
    way: Way, first: Sequence[Sequence[GeneratedAnswer]], other: Sequence[Sequence[GeneratedAnswer]]
) -> Equal:
    """How far answers are the same: those at temperature 0, and those with a seed."""
    greedy, seeded = (
        sum(one.ids == two.ids for one, two in zip(*both, strict=True))
        for both in zip(first, other, strict=True)
    )
    moved = [
        abs(one - two)
        for both in zip(first, other, strict=True)
        for pair in zip(*both, strict=True)
        for one, two in _in_common(*pair)
    ]
    return Equal(way, greedy, seeded, statistics.median(moved), max(moved))


def _in_common(first: GeneratedAnswer, second: GeneratedAnswer) -> Iterator[tuple[float, float]]:
    """Log probabilities up to the first id that differs."""
    for one, two, *logprobs in zip(first.ids, second.ids, first.logprobs, second.logprobs, strict=True):
        if one != two:
            return
        yield logprobs[0], logprobs[1]


def measure(model: Path, runner: RunnerName, common: LocalOptions, number: int, tokens: int) -> list[Equal]:
    asked: list[Question] = []
    alone: list[list[GeneratedAnswer]] = []
    equals = []
    for guesses in (0, GUESSES) if runner == "openvino" else (0,):
        options = replace(common, runner=runner, guesses=guesses)
        with closing(LocalEngine.open(model, options)) as engine, asyncio.Runner() as loop:
            asked = asked or loop.run(questions(engine, number, tokens))
            for company, known in product(COMPANY, (False, True)):
                way = Way(runner, guesses, company, known)
                items = [
                    loop.run(ask(engine, asked, each, company=company, known=known))
                    for each in samplings(tokens)
                ]
                alone = alone or items
                equals.append(equal(way, alone, items))
                print(f"same: {equals[-1]}", flush=True)
    return equals


def table(equals: Sequence[Equal], model: Path, number: int, tokens: int) -> Table:
    rows = [
        [
            each.way.runner,
            "on" if each.way.guesses else "off",
            f"beside {each.way.company}" if each.way.company else "alone",
            "known" if each.way.known else "fresh",
            f"{each.greedy} of {number}",
            f"{each.seeded} of {number}",
            f"{each.middle:.4f}",
            f"{each.most:.4f}",
        ]
        for each in equals
    ]
    head = ("runner", "guesses", "company", "prefix", "same", "same, seeded", "middle difference", "largest")
    where = f"{model.name}, answers of {tokens} tokens. {machine.describe()}"
    note = f"Against each runner's first row; differences are of log probabilities. {where}."
    return Table("The same question, the same answer", head, rows, [note])


def main(model: Path, runners: Sequence[RunnerName], options: LocalOptions, number: int, tokens: int) -> None:
    equals = [each for runner in runners for each in measure(model, runner, options, number, tokens)]
    keep("same", equals, [table(equals, model, number, tokens)])
    if any(each.greedy < number or each.seeded < number for each in equals):
        raise BenchError("Some answers depend on more than their question.")


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.same", description=__doc__)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file [default: the default weights]"
    )
    parser.add_argument("--runner", action="append", choices=RUNNERS, help="one of them [default: both]")
    parser.add_argument("--kv-cache", default="auto", help="how keys and values are kept [default: auto]")
    parser.add_argument("--deterministic", action="store_true", help="as `dragoman serve --deterministic`")
    parser.add_argument("--readers", type=int, default=32, help="that are expected [default: 32]")
    parser.add_argument("--prompts", type=int, default=200, help="how many [default: 200]")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer [default: 32]")
    parser.add_argument("--threads", type=int, default=2, help="compute threads [default: 2]")
    args = parser.parse_args()
    options = LocalOptions(
        kv_cache=args.kv_cache,
        deterministic=args.deterministic,
        threads=args.threads,
        readers=args.readers,
        slots=32,
        context=_CONTEXT,
    )
    main(args.model or default_model(), args.runner or RUNNERS, options, args.prompts, args.tokens)


if __name__ == "__main__":
    sys.exit(told(cli))
