"""From what a client asked to what an engine is asked. Everything that can be refused is refused here."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from os import urandom
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.engines.sound import encoded
from dragoman.errors import MODEL, BadRequest, ContextOverflow, ModelNotFound, Part
from dragoman.limits import Limits
from dragoman.prompt import Prompter
from dragoman.prompt.stitch import stitch_prompt
from dragoman.turns.checks import (
    check_told_prompts,
    check_turn,
    choose_adapters,
    refuse_unsupported,
    tokens_told,
)
from dragoman.turns.constrain import Constrainer, dialect_for
from dragoman.turns.language import ids_opened_reasoning, opened_reasoning
from dragoman.turns.sampling import Breakers, Defaults, defaults_of
from dragoman.turns.spec import TurnSpec
from dragoman.turns.trails import Trails
from dragoman.types import Adapters, Conversation, Job, Prompt, Sampling, Traced

Rendered: TypeAlias = tuple[str, tuple[int, ...], Traced | None]
"""A prompt as text and as ids, and the turn that it goes on from."""
# Collecting garbage looks at every id of the tuples that are new, once, while all threads wait: these many
# take some milliseconds. Those of hundreds of prompts at once would take 50.
_YOUNG_IDS = 2**19


class TurnPlan(Struct, frozen=True):
    """What an engine is asked for a turn, and what the prompts say about how the answers begin."""

    jobs: list[Job]
    in_reasoning: list[bool]
    """For each job, whether its prompt has opened reasoning."""
    dialect: Dialect
    """How the answers are written."""
    keys: Sequence[bytes] = ()
    """For each job, what its answers are remembered by; empty if it is no conversation that may go on."""
    after: Sequence[Traced | None] = ()
    """For each job, the turn whose ids its prompt goes on from."""


class Planner:
    """Plans turns. Safe to call from a worker thread."""

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        prompter: Prompter,
        dialect: Dialect,
        aliases: Iterable[str] = (),
        limits: Limits | None = None,
        defaults: Defaults | None = None,
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.prompter = prompter
        self.dialect = dialect
        self.trails = Trails(card.name, tokenizer.pieces)
        self._ends = [tokenizer.pieces[id_].decode("utf-8", "replace") for id_ in tokenizer.end_ids]
        self._limits = limits or Limits()
        self._defaults = defaults or defaults_of(card, {})
        self._breakers = Breakers(tokenizer.pieces)
        self._constrainer = Constrainer(card, tokenizer, self._limits)
        self.names = (card.name, *aliases)

    def warm_up(self) -> None:
        """Make what the first constrained answer would wait for."""
        self._constrainer.vocabulary  # noqa: B018

    def adapter(self, model: str | None) -> str | None:
        """The adapter a model name stands for; None is the model itself."""
        if model is None or model in self.names:
            return None
        if model in self.card.adapters:
            return model
        known = ", ".join([*self.names, *self.card.adapters])
        raise ModelNotFound(f"The model '{model}' does not exist here; there is: {known}.", param=MODEL)

    def check(self, spec: TurnSpec) -> None:
        """Raises for all that is wrong with a turn, whatever its prompt will be."""
        self._checked(spec)
        self._constrainer.check_grammar(spec, dialect_for(spec, self.dialect))

    def _checked(self, spec: TurnSpec) -> tuple[Adapters, Sampling]:
        check_turn(spec, self._limits)
        adapters = choose_adapters(self.card, self.adapter(spec.model), spec.adapters)
        self._constrainer.check(spec)
        refuse_unsupported(spec, self.card)
        return adapters, self._sampling(spec)

    def plan(self, spec: TurnSpec) -> TurnPlan:
        adapters, sampling = self._checked(spec)
        dialect = dialect_for(spec, self.dialect)
        salt = f"{adapters or ''}\0{spec.salt}"
        prompts = [*self._fit_all(spec, dialect, salt)]
        check_told_prompts(spec, [len(ids) for _, ids, _ in prompts], self._limits)
        begun = [
            self._in_reasoning(spec, dialect, prompt, rendered)
            for prompt, rendered in zip(spec.prompts, prompts, strict=True)
        ]
        keys = [
            self._key(spec, prompt, text, salt)
            for prompt, (text, *_) in zip(spec.prompts, prompts, strict=True)
        ]
        jobs = [
            Job(
                id=urandom(16).hex(),
                prompt=self.trails.shared(prompt) if key else prompt,
                sampling=self._with_room(spec, sampling, len(prompt)),
                n=spec.n,
                constraint=self._constrainer.constraint(spec, dialect, in_reasoning=in_reasoning),
                adapters=adapters,
                owner=spec.owner,
                priority=spec.priority,
                reuse_prefix=spec.reuse_prefix,
                cache_salt="" if "cache_salt" in self.card.refused else spec.salt,
            )
            for (_, prompt, _), in_reasoning, key in zip(prompts, begun, keys, strict=True)
        ]
        return TurnPlan(jobs, begun, dialect, keys, [after for *_, after in prompts])

    def _key(self, spec: TurnSpec, prompt: Prompt, text: str, salt: str) -> bytes:
        if not isinstance(prompt, Conversation) or not prompt.add_generation_prompt:
            return b""
        # Nothing goes on from ids that no model has sampled, or from a prompt that was cut.
        goes_on = self.card.samples_ids and spec.truncate_prompt is None
        return self.trails.key(text, salt) if goes_on else b""

    def _rendered(self, prompt: Prompt, most: int | None, dialect: Dialect, salt: str) -> Rendered:
        """A conversation with an answer that we know goes on from the ids of that answer."""
        if isinstance(prompt, Conversation) and len(self.trails):
            kept = stitch_prompt(
                self.prompter,
                prompt,
                dialect,
                self._ends,
                lambda text: self.trails.find(self.trails.key(text, salt)),
            )
            if kept is not None:
                return kept
        return *self.prompter.render(prompt, most), None

    def _in_reasoning(self, spec: TurnSpec, dialect: Dialect, prompt: Prompt, rendered: Rendered) -> bool:
        text, ids, _ = rendered
        if isinstance(prompt, Conversation):
            return opened_reasoning(dialect, prompt, text)
        return spec.reading is not None and ids_opened_reasoning(dialect, ids, self.tokenizer)

    def _fit_all(self, spec: TurnSpec, dialect: Dialect, salt: str) -> Iterator[Rendered]:
        young = 0
        for prompt in spec.prompts:
            rendered = self._fit(prompt, spec.truncate_prompt, dialect, salt)
            yield rendered
            young += len(rendered[1])
            if young > _YOUNG_IDS:
                gc.collect(1)
                young = 0

    def _fit(self, prompt: Prompt, keep: int | None, dialect: Dialect, salt: str) -> Rendered:
        """The prompt as text and as ids, which are cut as asked; more than the model takes is refused."""
        most = self.prompter.most_tokens
        text, ids, after = self._rendered(prompt, most if keep is None else None, dialect, salt)
        if keep is not None:
            whole, ids = len(ids), ids[-(most if keep < 0 else keep) :]
            after = after if len(ids) == whole else None
        if not ids:
            raise BadRequest("The prompt is empty.", param=prompt.param, code="empty_prompt")
        if len(ids) > most:
            message = f"The prompt has {len(ids)} tokens, but {most} are the most; shorten it."
            raise ContextOverflow(message, param=prompt.param)
        return text, ids, after

    def _with_room(self, spec: TurnSpec, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """The answer ends where the context does: more was asked for than fits is no reason to refuse."""
        room = self.card.max_model_len - prompt_tokens
        most = tokens_told(spec, min(sampling.max_tokens or room, room), self._limits)
        if sampling.min_tokens <= most == sampling.max_tokens:
            return sampling
        return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))

    def _sampling(self, spec: TurnSpec) -> Sampling:
        sampling = self._defaults.applied(spec)
        self._check_ids(sampling.logit_bias, Part("logit_bias"))
        self._check_ids(sampling.stop_token_ids, Part("stop_token_ids"))
        self._check_ids(sampling.allowed_token_ids or (), Part("allowed_token_ids"))
        if sampling.samplers is not None and spec.dry_breakers:
            asked = replace(sampling.samplers, dry_breakers=self._breakers.ids(spec.dry_breakers))
            sampling = replace(sampling, samplers=asked)
        if not spec.bad_words:
            return sampling
        return replace(sampling, bad_words=tuple(self._spellings(spec.bad_words)))

    def _check_ids(self, ids: Iterable[int], param: Part) -> None:
        size = len(self.tokenizer.pieces)
        for id_ in ids:
            if not 0 <= id_ < size:
                message = f"Token id {id_} is outside of the vocabulary (0 to {size - 1})."
                raise BadRequest(message, param=param, code="invalid_token_id")

    def _spellings(self, words: tuple[str, ...]) -> Iterable[tuple[int, ...]]:
        """A word has other ids at the start of a text than after a space: both are banned."""
        seen = set()
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                ids = tuple(encoded(self.tokenizer, self.tokenizer.encode(text)))
                if ids and ids not in seen:
                    seen.add(ids)
                    yield ids
