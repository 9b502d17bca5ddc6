"""Turns a request into jobs for the engine. Everything that can be rejected is rejected here.

A prompt reuses the exact ids of earlier turns where it can, so recent turns are cached here, too.
"""

import gc
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from hashlib import blake2b
from os import urandom
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.registry import with_calls
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.errors import MODEL, BadRequest, ContextOverflow, ModelNotFound, ParamKey, SettingsError
from dragoman.limits import Limits
from dragoman.media import MediaSpan, check_modalities
from dragoman.prompt import PromptBuilder
from dragoman.prompt.encode import IdInterner, canonical_content, chain_messages, check_encoded, digest_frame
from dragoman.prompt.media_placeholders import cut_spans, strip_spans
from dragoman.prompt.prompt_cache import LEAST_KEPT, BreakReason, CachedPrompt, PromptCache, to_bytes
from dragoman.prompt.token_exact import ContinuedTurn, TokenExactBuilder
from dragoman.turns.adapters import AdapterRegistry
from dragoman.turns.choice_reader import ChoiceReader
from dragoman.turns.constraints import ConstraintBuilder
from dragoman.turns.reasoning_memory import ReasoningMemory, tokens_in
from dragoman.turns.spec import (
    DryBreakerIndex,
    History,
    RequestDefaults,
    TurnSpec,
    check_told_prompts,
    check_turn,
    defaults_of,
    ids_opened_reasoning,
    opened_reasoning,
    refuse_unsupported,
    tokens_told,
)
from dragoman.types import UNBOUNDED, Adapters, Conversation, Job, JobConstraint, Prompt, Sampling, TurnRecord

# Recent turns. The key of a turn has three parts:
#
# - the chained digest of the messages that it answered, by which a turn is found;
# - digest and length of the prompt's text: a longer text that begins with it can continue the turn;
# - a digest of what else the prompt depends on (tools, template, template variables).


MOST_IDS = 8 * 1024 * 1024
"""Cached ids of prompts and answers: about 64 MB."""
MOST_ANSWERS = 16
"""Cached answers per prompt."""
_DIGEST = 16
_LENGTH = 4


class TurnCache:
    """Cache of recent turns, safe for threads. The owner with the most ids loses the least recently used
    first.
    """

    def __init__(
        self,
        model: str = "",
        pieces: Sequence[bytes] = (),
        most_ids: int = MOST_IDS,
        share: IdInterner | None = None,
    ) -> None:
        """`pieces` is the model's vocabulary: turns of another vocabulary must not be found, whatever the
        name.
        """
        self.share = share or IdInterner(len(pieces))
        self._model = blake2b(b"\0".join([model.encode(), *pieces]), digest_size=16).digest()
        self._most_ids = most_ids
        self._kept: dict[bytes, list[TurnRecord]] = {}
        """Turns by the first part of their keys, the digest of the messages."""
        self._owner_of: dict[bytes, str] = {}
        self._used: dict[str, OrderedDict[bytes, None]] = {}
        """The keys of each owner, least recently used first."""
        self._ids: Counter[str] = Counter()
        """The number of cached ids per owner."""
        self._lock = threading.Lock()

    def key(self, prompt: str, salt: str = "", known: CachedPrompt | None = None) -> bytes:
        """Return the key of a turn, the same in every process. `known` is what the text `prompt` was
        made of.
        """
        chain = known.chain.prompt_digest(known.conversation) if known else b""
        frame = digest_frame(known.conversation) if known else b""
        large = known if len(prompt) >= LEAST_KEPT else None
        text = large.hash(prompt, self._hash(salt)) if large else self._digest(to_bytes(prompt), salt)
        return self._digest(chain, salt) + text + self._digest(frame) + len(prompt).to_bytes(_LENGTH, "big")

    @staticmethod
    def outline(key: bytes) -> bytes:
        """Return the key of a turn of which only the answer is known; no prompt continues it."""
        return key[:_DIGEST] + bytes(2 * _DIGEST + _LENGTH)

    def _hash(self, salt: str) -> blake2b:
        return blake2b(to_bytes(salt) + b"\0", digest_size=_DIGEST, key=self._model)

    def _digest(self, data: bytes, salt: str = "") -> bytes:
        result = self._hash(salt)
        result.update(data)
        return result.digest()

    def matching_prefix(self, turn: TurnRecord, text: str, salt: str) -> int | None:
        """Return the length of the turn's prompt if the text begins with it, else None."""
        length = int.from_bytes(turn.prompt_key[-_LENGTH:], "big")
        if length > len(text):
            return None
        same = self._digest(to_bytes(text[:length]), salt) == turn.prompt_key[_DIGEST : 2 * _DIGEST]
        return length if same else None

    def same_frame(self, turn: TurnRecord, frame: bytes) -> bool:
        return self._digest(frame) == turn.prompt_key[2 * _DIGEST : 3 * _DIGEST]

    def add(self, turn: TurnRecord, owner: str = "", *, planned: bool = False) -> None:
        """Add a turn. With `planned`, its prompt ids are shared already, which would take long for a long
        one.
        """
        prompt = turn.prompt if planned else self.share(turn.prompt)
        turn = replace(turn, prompt=prompt, ids=self.share(turn.ids))
        key = turn.prompt_key[:_DIGEST]
        with self._lock:
            known = self._kept.setdefault(key, [])
            owner = self._owner_of.setdefault(key, owner)
            self._use(key)
            # Answers to one prompt share the prompt, which may be long: compare what differs first.
            if any(each.source == turn.source and each.ids == turn.ids and each == turn for each in known):
                return
            known.append(turn)
            self._ids[owner] += turn.total_ids
            if len(known) > MOST_ANSWERS:
                self._ids[owner] -= known.pop(0).total_ids
            while self._kept and self._ids.total() > self._most_ids:
                self._drop(max(self._ids, key=self._ids.__getitem__))

    def _use(self, key: bytes) -> None:
        used = self._used.setdefault(self._owner_of[key], OrderedDict())
        used[key] = None
        used.move_to_end(key)

    def _drop(self, owner: str) -> None:
        key, _ = self._used[owner].popitem(last=False)
        self._ids[owner] -= sum(each.total_ids for each in self._kept.pop(key))
        del self._owner_of[key]
        if not self._used[owner]:
            del self._used[owner], self._ids[owner]

    def find_by_messages(self, chain: bytes, salt: str = "") -> Sequence[TurnRecord]:
        """Return the answers to these messages, latest first."""
        return self.find(self._digest(chain, salt))

    def find(self, key: bytes) -> Sequence[TurnRecord]:
        """Return the turns with the same messages as the turn of this key, latest first."""
        key = key[:_DIGEST]
        with self._lock:
            if key not in self._kept:
                return ()
            self._use(key)
            return self._kept[key][::-1]

    def prefer(self, key: bytes, source: str) -> bool:
        """Make the turn of this answer the first to be found; returns False if it is not cached."""
        with self._lock:
            known = self._kept.get(key[:_DIGEST], [])
            number = next((number for number, turn in enumerate(known) if turn.source == source), None)
            if number is None:
                return False
            known.append(known.pop(number))
            return True

    def __len__(self) -> int:
        return len(self._kept)


# Plans.


Ids: TypeAlias = tuple[int, ...]
Rendered: TypeAlias = tuple[
    str, Ids, ContinuedTurn | None, BreakReason, CachedPrompt | None, tuple[MediaSpan, ...]
]
"""A prompt: text, ids, the turn that it continues, why it continues no more, its cached form, its media."""
# The garbage collector visits every id of new tuples once, while all threads wait: this many take some
# milliseconds, the ids of hundreds of prompts would take 50.
_YOUNG_IDS = 2**19


class TurnPlan(Struct, frozen=True):
    """The jobs of a turn, with what the prompts imply for reading the answers."""

    jobs: list[Job]
    in_reasoning: list[bool]
    """For each job, whether its prompt has opened reasoning."""
    dialect: Dialect
    """The dialect of the answers."""
    stop: tuple[str, ...] = ()
    """Stop strings of client, operator and template."""
    keys: Sequence[Callable[[], bytes]] = ()
    """For each job, a function that returns the key to cache its answers by; empty if nothing can continue
    them.
    """
    continued_turns: Sequence[ContinuedTurn | None] = ()
    """For each job, the turn that its prompt continues."""
    unenforced: str = ""
    """The request field that the engine cannot enforce, if there is one."""
    splits: Sequence[BreakReason] = ()
    """For each job, the reason why its prompt does not continue the answer before it."""
    history: History = "template"
    answered_prompts: Sequence[tuple[Prompt, Callable[[], bytes]]] = ()
    """The prompts with their message digests; empty if answers are not remembered."""
    restored_tokens: int = 0
    """Prompt tokens of reasoning that was put back."""

    def log_fields(self, number: int) -> dict[str, Any]:
        """Return the fields of a `TurnRecord` turn that describe a job's prompt."""
        after = self.continued_turns[number] if self.continued_turns else None
        gone_on = (
            {"continues": after.turn.source or None, "reused_ids": after.kept, "dropped_ids": after.cut}
            if after
            else {}
        )
        shown = {"media": strip_spans(media)} if (media := self.jobs[number].media) else {}
        split = self.splits[number] if self.splits else ""
        return {**gone_on, **shown, "break_reason": split, "history": self.history}


class Planner:
    """Plans turns. Safe to call from a worker thread."""

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        prompter: PromptBuilder,
        dialect: Dialect,
        aliases: Iterable[str] = (),
        limits: Limits | None = None,
        defaults: Mapping[str, RequestDefaults] | None = None,
        *,
        any_name: bool = False,
        checks: bool = False,
    ) -> None:
        """`defaults` by the names of the model and its adapters; "" stands for adapters without their own."""
        self._limits = limits or Limits()
        self.card, self.adapters = card, AdapterRegistry(card)
        self.tokenizer = tokenizer
        self.prompter = prompter
        self.dialect = dialect
        self.turn_cache = TurnCache(card.name, tokenizer.pieces, share=prompter.share)
        self.prompt_cache = PromptCache()
        self.reasoning_memory = ReasoningMemory(self._limits.thoughts, self._limits.thought_bytes)
        self._ends = {id_: tokenizer.pieces[id_].decode("utf-8", "replace") for id_ in tokenizer.end_ids}
        self._defaults = defaults or dict.fromkeys((card.name, ""), defaults_of(card))
        self._breakers = DryBreakerIndex(tokenizer.pieces)
        self._constrainer = ConstraintBuilder(card, tokenizer, self._limits, checks=checks)
        self.names = (card.name, *aliases)
        self._any_name = any_name
        self._check_defaults()

    def warm_up(self) -> None:
        """Build the vocabulary that the first constrained answer would wait for."""
        self._constrainer.vocabulary  # noqa: B018

    def resolve_adapter(self, model: str | None) -> str | None:
        """Return the adapter that a model name stands for; None is the model itself."""
        if model is None or model in self.names:
            return None
        if model in self.card.adapters:
            return model
        if self._any_name:
            return None
        known = ", ".join([*self.names, *self.card.adapters])
        raise ModelNotFound(f"The model '{model}' does not exist here; available: {known}.", param=MODEL)

    def name(self, model: str | None) -> str:
        """Return the model name for replies: the one in the request, or the served model's if that is
        unknown.
        """
        known = model in self.names or model in self.card.adapters
        return model if model is not None and known else self.card.name

    def check(self, spec: TurnSpec) -> None:
        """Check a turn without rendering its prompt; raises if it is not valid."""
        self._checked(spec)
        if spec.bounded:
            self._constrainer.check_grammar(spec, dialect_for(spec, self.dialect))

    def _checked(self, spec: TurnSpec) -> tuple[Adapters, TurnSpec, Sampling]:
        check_turn(spec, self._limits)
        for prompt in spec.prompts:
            if isinstance(prompt, Conversation) and prompt.media:
                check_modalities(prompt.media, prompt.media_params, self.card.modalities)
        named, some = self.resolve_adapter(spec.model), self.card.adapters or spec.adapters
        adapters = self.adapters.resolve(named, spec.adapters) if some else ()
        if spec.bounded:
            self._constrainer.check(spec)
        refuse_unsupported(spec, self.card)
        settled = self._with_stops(self.defaults(spec.model).apply(spec))
        return adapters, settled, self._sampling(settled)

    def _with_stops(self, spec: TurnSpec) -> TurnSpec:
        """Add the template's stop strings; stop strings that are control tokens are added as stop ids."""
        stop = (*spec.stop, *(text for prompt in spec.prompts for text in self.prompter.stops(prompt)))
        if not stop:
            return spec
        control = {self.tokenizer.special_ids[text] for text in stop if text in self.tokenizer.special_ids}
        if control and "stop_token_ids" not in self.card.refused_fields:
            ids = spec.sampling.stop_token_ids | control
            spec = replace(spec, sampling=replace(spec.sampling, stop_token_ids=ids))
        return replace(spec, stop=tuple(dict.fromkeys(stop)))

    def _check_defaults(self) -> None:
        """Check the operator's settings at the start rather than with each request."""
        for defaults in self._defaults.values():
            asked = defaults.apply(TurnSpec(model=None, prompts=(), sampling=Sampling(max_tokens=0)))
            try:
                check_turn(asked, self._limits)
                self._sampling(asked)
            except BadRequest as error:
                message = f"`sampling`, `override` or `presets`: {error.message}"
                raise SettingsError(message, param="sampling") from None

    def defaults(self, model: str | None) -> RequestDefaults:
        """Return the defaults for requests that use this model name."""
        own = "" if model in self.card.adapters else self.card.name
        return self._defaults.get(model or own) or self._defaults[own]

    def render(self, model: str | None, prompt: Prompt) -> tuple[str, tuple[int, ...]]:
        """Render a prompt to text and ids, as a turn of this model name would."""
        self.resolve_adapter(model)
        text, ids = self.prompter.render(self.defaults(model).settle_prompt(prompt))
        return self.prompter.display_text(text, prompt), ids

    def plan(self, spec: TurnSpec) -> TurnPlan:
        adapters, spec, sampling = self._checked(spec)
        dialect = dialect_for(spec, self.dialect)
        salt = f"{adapters or ''}\0{spec.salt}"
        spec, prompts, restored = self._with_thoughts(spec, dialect, salt)
        check_told_prompts(spec, [len(ids) for _, ids, *_ in prompts], self._limits)
        both = [*zip(spec.prompts, prompts, strict=True)]
        begun = [self._in_reasoning(spec, dialect, prompt, rendered) for prompt, rendered in both]
        keys = [self._key(spec, text, salt, known) for text, *_, known, _ in prompts]
        jobs = [
            Job(
                id=urandom(16).hex(),
                prompt=prompt,
                sampling=self._with_room(spec, sampling, len(prompt)),
                text=self.prompter.display_text(text, asked) if self.card.wants_prompt_text else "",
                conversation=chat if media and self.card.wants_conversation else None,
                media=media,
                n=spec.n,
                constraint=self._constraint(spec, dialect, in_reasoning),
                adapters=adapters,
                owner=spec.owner,
                priority=spec.priority,
                reuse_prefix=spec.reuse_prefix,
                cache_salt="" if "cache_salt" in self.card.refused_fields else spec.salt,
                routing_hints=spec.hints,
            )
            for (asked, (text, prompt, *_, media)), in_reasoning in zip(both, begun, strict=True)
            for chat in [asked if isinstance(asked, Conversation) else None]
        ]
        asked = spec.output_constraint or spec.tool_policy
        unenforced = asked.param if asked and any(job.constraint is None for job in jobs) else ""
        after, splits = [one[2] for one in prompts], [one[3] for one in prompts]
        links = [partial(k.chain.prompt_digest, k.conversation) if k else bytes for *_, k, _ in prompts]
        remembers = spec.keeps_reasoning or spec.history == "sampled"
        items = tuple(zip(spec.prompts, links, strict=True)) if remembers else ()
        more = keys, after, unenforced, splits, spec.history or "template", items, restored
        return TurnPlan(jobs, begun, dialect, spec.stop, *more)

    def _with_thoughts(
        self, spec: TurnSpec, dialect: Dialect, salt: str
    ) -> tuple[TurnSpec, list[Rendered], int]:
        """Put remembered reasoning back and render the prompts; also return the number of tokens that it
        added.
        """
        if self.reasoning_memory.count and spec.keeps_reasoning:
            restored, items = self.reasoning_memory.restore(spec)
            # If the prompt with reasoning does not fit, use the client's own messages: it knows of no others.
            with suppress(ContextOverflow) if restored is not spec else nullcontext():
                prompts = [*self._fit_all(restored, dialect, salt)]
                result = zip(prompts, items, strict=True)
                return restored, prompts, sum(tokens_in(text, each) for (text, *_), each in result)
        return spec, [*self._fit_all(spec, dialect, salt)], 0

    def remember(
        self, plan: TurnPlan, spec: TurnSpec, turn: TurnRecord, job: int, reader: ChoiceReader
    ) -> TurnRecord:
        """Cache the turn and its reasoning for later prompts."""
        (item, chain), answer_transcript = (
            plan.answered_prompts[job] if plan.answered_prompts else (None, bytes),
            reader.transcript,
        )
        if isinstance(item, Conversation) and answer_transcript is not None:
            begun = canonical_content(item.messages[-1])[0] if item.continue_final_message else ""
            turn = replace(turn, message_digest=chain_messages([answer_transcript.message(begun)])[-1])
            if answer_transcript.thoughts and spec.keeps_reasoning:
                ids, tokens = self.turn_cache.share(turn.ids), reader.reasoning_count
                self.reasoning_memory.add(item, chain(), spec, answer_transcript, tokens, ids, turn.source)
        if turn.prompt_key:
            self.turn_cache.add(turn, owner=spec.owner, planned=True)
        return turn

    def _constraint(self, spec: TurnSpec, dialect: Dialect, in_reasoning: bool) -> JobConstraint | None:
        make = self._constrainer.constraint
        return make(spec, dialect, in_reasoning=in_reasoning) if spec.bounded else None

    def _key(self, spec: TurnSpec, text: str, salt: str, known: CachedPrompt | None) -> Callable[[], bytes]:
        """Return a function that computes the cache key; for a long prompt it is computed now."""
        if known is None:
            return bytes
        # Nothing can continue ids that no model sampled, or a prompt that was truncated.
        prompt, goes_on = known.conversation, self.card.returns_ids and spec.truncate_prompt is None
        if not goes_on or not (prompt.add_generation_prompt or prompt.continue_final_message):
            return bytes
        key = partial(self.turn_cache.key, text, salt, known)
        return key if len(text) < LEAST_KEPT else partial(bytes, key())

    def _rendered(
        self, prompt: Prompt, most: int | None, spec: TurnSpec, dialect: Dialect, salt: str
    ) -> Rendered:
        """Render a prompt; a conversation with a cached answer continues the exact ids of that answer."""
        if not isinstance(prompt, Conversation):
            return *self.prompter.render(prompt, most), None, "", None, ()
        filling = self.prompter.filling(prompt) if prompt.media else None
        known = self.prompter.find_or_render(prompt, self.prompt_cache, f"{spec.owner}\0{salt}")
        answered = any(message.role == "assistant" for message in prompt.messages)
        if answered and len(self.turn_cache):
            seams = TokenExactBuilder(
                self.prompter, known, dialect, self._ends, self.turn_cache, salt, filling
            )
            if seams.known:
                stitched = (
                    seams.build_sampled() if spec.history == "sampled" else None
                ) or seams.build_rendered()
                parts = stitched.text, stitched.ids, stitched.after, stitched.split, known
                return *parts, filling.settle(prompt.media) if filling else ()
        parts = (
            *self.prompter.render(prompt, most, known, filling),
            None,
            "unknown" if answered else "",
            known,
        )
        return *parts, filling.settle(prompt.media) if filling else ()

    def _in_reasoning(self, spec: TurnSpec, dialect: Dialect, prompt: Prompt, rendered: Rendered) -> bool:
        text, ids, *_ = rendered
        if isinstance(prompt, Conversation):
            return opened_reasoning(dialect, prompt, text)
        return spec.parsing is not None and ids_opened_reasoning(dialect, ids, self.tokenizer)

    def _fit_all(self, spec: TurnSpec, dialect: Dialect, salt: str) -> Iterator[Rendered]:
        young = 0
        for prompt in spec.prompts:
            rendered = self._fit(prompt, spec, dialect, salt)
            yield rendered
            young += len(rendered[1])
            if young > _YOUNG_IDS:
                gc.collect(1)
                young = 0

    def _fit(self, prompt: Prompt, spec: TurnSpec, dialect: Dialect, salt: str) -> Rendered:
        """Render and, if requested, truncate a prompt; raises if it is longer than the model takes."""
        most, keep = self.prompter.most_tokens, spec.truncate_prompt
        bound = most if keep is None else None
        text, ids, after, split, known, media = self._rendered(prompt, bound, spec, dialect, salt)
        if keep is not None:
            whole, ids = len(ids), ids[-(most if keep < 0 else keep) :]
            after = after if len(ids) == whole else None
            media, left = cut_spans(media, whole, len(ids))
            ids = ids[len(ids) - left :]
        if not ids:
            raise BadRequest("The prompt is empty.", param=prompt.param, code="empty_prompt")
        if len(ids) > most:
            raise ContextOverflow.of(len(ids), most, prompt.param)
        return text, ids, after, split, known, media

    def _with_room(self, spec: TurnSpec, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """Limit `max_tokens` to the context that is left; asking for more is not an error."""
        room = min(
            self.card.remaining_tokens(prompt_tokens),
            UNBOUNDED if spec.remaining_tokens is None else spec.remaining_tokens,
        )
        most = tokens_told(spec, min(sampling.max_tokens or room, room), self._limits)
        if sampling.min_tokens <= most == sampling.max_tokens:
            return sampling
        return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))

    def _sampling(self, spec: TurnSpec) -> Sampling:
        sampling = self.defaults(spec.model).limit(spec.sampling)
        self._check_ids(sampling.logit_bias, ParamKey("logit_bias"))
        self._check_ids(sampling.stop_token_ids, ParamKey("stop_token_ids"))
        self._check_ids(sampling.allowed_token_ids or (), ParamKey("allowed_token_ids"))
        if sampling.samplers is not None and sampling.samplers.dry_multiplier and spec.dry_breakers:
            asked = replace(sampling.samplers, dry_breakers=self._breakers.ids(spec.dry_breakers))
            sampling = replace(sampling, samplers=asked)
        if not spec.bad_words:
            return sampling
        return replace(sampling, bad_words=tuple(self._spellings(spec.bad_words)))

    def _check_ids(self, ids: Iterable[int], param: ParamKey) -> None:
        size = len(self.tokenizer.pieces)
        for id_ in ids:
            if not 0 <= id_ < size:
                message = f"Token id {id_} is outside of the vocabulary (0 to {size - 1})."
                raise BadRequest(message, param=param, code="invalid_token_id")

    def _spellings(self, words: tuple[str, ...]) -> Iterable[tuple[int, ...]]:
        """Yield the ids of each word. A word has different ids at the start of a text and after a space."""
        seen = set()
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                ids = tuple(check_encoded(self.tokenizer, self.tokenizer.encode(text)))
                if ids and ids not in seen:
                    seen.add(ids)
                    yield ids


def dialect_for(spec: TurnSpec, dialect: Dialect) -> Dialect:
    """Return the model's dialect; one without tool calls gets JSON calls if the request has tools."""
    if dialect.has_calls or spec.parsing is None or not spec.parsing.calls:
        return dialect
    return with_calls(dialect)
