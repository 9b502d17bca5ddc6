"""Reinforcement learning in one process: the engine answers, and gets the weights back after each step.

    python examples/reinforce.py

A tiny model with random weights is asked "7=", and the reward is the share of its answer that is that digit:
a tenth at first, and nearly all after a few hundred steps, which take about a minute on a CPU. Trained on
are the ids that the engine sampled and the log probabilities that it sampled them with: nothing is
tokenized twice, and they are compared with what the model in training says of the same ids.

The objective is GRPO's: an answer is as good as its reward is above the mean of those to the same prompt.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, field

from dragoman import Job, Sampling
from dragoman.engines.local import LocalOptions, TrainableEngine

CHARACTERS = "0123456789=+-. "
LENGTH = 6
"""Tokens of an answer."""
CLIP = 0.2


class Options(Struct, frozen=True):
    steps: int = 300
    prompts: int = 6
    """In a step."""
    group: int = 8
    """Answers to each prompt."""
    rate: float = 2e-3
    seed: int = 0


class Rollout(Struct):
    """One answer, as the engine gave it."""

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: set[str | None] = field(default_factory=set)
    advantage: float = 0.0

    @property
    def reward(self) -> float:
        return sum(id_ == self.prompt[0] for id_ in self.ids) / LENGTH


class Progress(Struct, frozen=True):
    """What came of one step."""

    reward: float
    apart: float
    """The most that a log probability of the engine differs from that of the model in training."""


def make_model(folder: Path) -> Any:
    """A model of `transformers`, saved in a folder with its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE(vocab={each: id_ for id_, each in enumerate(CHARACTERS)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    return model


async def roll_out(engine: TrainableEngine, options: Options, number: int) -> list[Rollout]:
    """Answers to some prompts, a group to each, all at the same time."""
    choose = random.Random(f"{options.seed} {number}")
    jobs = []
    for offset in range(options.prompts):
        prompt = engine.tokenizer.encode(f"{choose.randrange(10)}=")
        sampling = Sampling(
            max_tokens=LENGTH, temperature=1.0, logprobs=0, ignore_eos=True, seed=choose.randrange(2**31)
        )
        jobs.append(Job(id=f"{number}-{offset}", prompt=tuple(prompt), sampling=sampling, n=options.group))
    groups = await asyncio.gather(*(_answers(engine, job) for job in jobs))
    for group in groups:
        mean = sum(each.reward for each in group) / len(group)
        for each in group:
            each.advantage = each.reward - mean
    return [each for group in groups for each in group]


async def _answers(engine: TrainableEngine, job: Job) -> list[Rollout]:
    items = [Rollout(tuple(job.prompt)) for _ in range(job.n)]
    async for step in engine.generate(job):
        mine = items[step.index]
        mine.ids += step.ids
        mine.logprobs += [entry.logprob for entry in step.logprobs or ()]
        mine.weight_versions.add(step.weight_version)
    return items


def improve(model: Any, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout]) -> float:
    """One step of the optimizer; how far the log probabilities of both are apart."""
    prompt = len(rollouts[0].prompt)
    rows = torch.tensor([[*each.prompt, *each.ids] for each in rollouts])
    sampled = torch.tensor([each.logprobs for each in rollouts])
    advantages = torch.tensor([each.advantage for each in rollouts])[:, None]
    likely = model(rows).logits[:, prompt - 1 : -1].log_softmax(-1)
    ours = likely.gather(2, rows[:, prompt:, None])[:, :, 0]
    ratio = (ours - sampled).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    optimizer.zero_grad()
    (-gain.mean()).backward()
    optimizer.step()
    return float((ours - sampled).detach().abs().max())


async def train(engine: TrainableEngine, model: Any, options: Options) -> list[Progress]:
    optimizer = torch.optim.Adam(model.parameters(), options.rate)
    items = []
    for number in range(options.steps):
        rollouts = await roll_out(engine, options, number)
        apart = improve(model, optimizer, rollouts)
        await engine.update_weights(model.named_parameters(), weight_version=f"{number + 1}")
        items.append(Progress(sum(each.reward for each in rollouts) / len(rollouts), apart))
        if number % 20 == 0 or number == options.steps - 1:
            text = f"reward {items[-1].reward:.2f}, log probabilities apart by {apart:.1e}"
            print(f"step {number:4}: {text}", flush=True)
    return items


def run(options: Options) -> list[Progress]:
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        answers = options.prompts * options.group
        local = LocalOptions(runner="torch", slots=answers, context=64, deterministic=True)
        with closing(TrainableEngine.open(folder, local)) as engine:
            return asyncio.run(train(engine, model, options))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of the optimizer [default: 300]")
    run(Options(steps=parser.parse_args().steps))
