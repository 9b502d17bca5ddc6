"""Idle prefill: answers are computed as prompts while the engine is idle, for requests that will continue
them.

If a runner computes answers differently from prompts (`rereads`), the KV cache of an answer cannot be used by
a prompt that continues it: in its last bits it would differ from the same text sent to a server that has
never seen it. So the answer has to be computed again, and the client would wait for that. Usually there is
time: people read, and agents run their tools. So the scheduler computes the answer as a prompt in a job of
its own once no request has come for a moment, and interrupts it for any request. What was computed by then is
cached like any other prompt.
"""

from collections import deque

import numpy as np

from dragoman.engines.local.kv_cache import WORTH_SHARING
from dragoman.engines.local.runner import AnyRunner
from dragoman.engines.local.sequence import Sequence, SequenceGroup
from dragoman.engines.protocol import BACKGROUND_PRIORITY
from dragoman.engines.sampling import Ids
from dragoman.engines.sampling.batched import Continuation, DeviceSampler
from dragoman.types import Job, Sampling, Step

_MOST = 8
"""Maximum answers in the queue; older ones are dropped, and computed when a request continues them."""


class IdlePrefill:
    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner
        self._due: deque[SequenceGroup] = deque(maxlen=_MOST)

    def __bool__(self) -> bool:
        return bool(self._due)

    def note(self, sequence: Sequence) -> None:
        """Queue an answer that has ended, if requests may continue it."""
        if not self._runner.decode_kv_differs or isinstance(self._runner, DeviceSampler):
            # Where ids are sampled on another device, prefill is too fast to be worth it.
            return
        group, numbers = sequence.group, sequence.answer.output
        job = group.job
        # Adapters may be unloaded meanwhile, and encoded media evicted.
        alone = job.n == 1 and job.reuse_prefix and not job.adapters and not job.media
        ids: Ids = np.concatenate([group.prompt, np.array(numbers, np.int32)])
        if alone and len(numbers) >= WORTH_SHARING and len(ids) < self._runner.context:
            self._due.append(self._make(group, ids))

    def again(self, group: SequenceGroup) -> None:
        """Queue a job again that was interrupted."""
        self._due.append(self._make(group, group.prompt))

    def take(self) -> SequenceGroup | None:
        """Return the latest answer: its client is the likeliest to continue."""
        return self._due.pop() if self._due else None

    def clear(self) -> None:
        self._due.clear()

    def _make(self, group: SequenceGroup, ids: Ids) -> SequenceGroup:
        """Create a job that prefills, samples one token, and reports nothing."""
        job = Job(
            id=f"{group.job.id}-again",
            prompt=(),
            sampling=Sampling(max_tokens=1, temperature=0.0),
            owner=group.job.owner,
            priority=BACKGROUND_PRIORITY,
            cache_salt=group.job.cache_salt,
        )
        sequence_group = SequenceGroup(job, _nobody, group.loop, ids)
        sequence_group.is_idle_prefill = True
        answer = Continuation(job, 0, ids, vocabulary=self._runner.vocabulary, ends=frozenset(), room=1)
        sequence_group.sequences.append(Sequence(sequence_group, 0, (BACKGROUND_PRIORITY, 0, 0), answer))
        return sequence_group


def _nobody(step: Step) -> None:
    """Sink of such a job, which reports nothing."""
