"""Answers that are read once more while nobody waits, because prompts go on from them.

Where a runner computes what is said in another way than what is read (`rereads`), keys and values of an
answer are of no use to the prompt that goes on from it: in its last bits it would be another prompt than the
same text sent to a server that has never seen it. So the answer has to be read again, and whoever talks with
the model would wait for that. Mostly, though, there is time: people read, and agents run their tools. So the
scheduler reads the answer in a job of its own once nothing has come for a moment, and breaks that off for
whatever comes. What was read by then is kept like any other prompt.
"""

from collections import deque

import numpy as np

from dragoman.engines.choosing import Ids
from dragoman.engines.choosing.together import Continuation, Drawer
from dragoman.engines.local.memory import WORTH_SHARING
from dragoman.engines.local.runner import AnyRunner
from dragoman.engines.local.sequence import Group, Sequence
from dragoman.engines.protocol import BEHIND
from dragoman.types import Job, Sampling, Step

_MOST = 8
"""Answers that wait for it; older ones are forgotten, and read when somebody goes on from them."""


class Rereading:
    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner
        self._due: deque[Group] = deque(maxlen=_MOST)

    def __bool__(self) -> bool:
        return bool(self._due)

    def note(self, sequence: Sequence) -> None:
        """An answer has come to its end, of which others may go on."""
        if not self._runner.rereads or isinstance(self._runner, Drawer):
            # Where ids are chosen on another device, reading takes no time that anybody would notice.
            return
        group, said = sequence.group, sequence.answer.output
        job = group.job
        # Adapters may be taken away meanwhile, and what was seen may be forgotten.
        alone = job.n == 1 and job.reuse_prefix and not job.adapters and not job.media
        ids: Ids = np.concatenate([group.prompt, np.array(said, np.int32)])
        if alone and len(said) >= WORTH_SHARING and len(ids) < self._runner.context:
            self._due.append(self._make(group, ids))

    def again(self, group: Group) -> None:
        """It was broken off."""
        self._due.append(self._make(group, group.prompt))

    def take(self) -> Group | None:
        """The latest: its reader is the likeliest to go on."""
        return self._due.pop() if self._due else None

    def clear(self) -> None:
        self._due.clear()

    def _make(self, group: Group, ids: Ids) -> Group:
        """A job that reads, says one token, and is heard by nobody."""
        job = Job(
            id=f"{group.job.id}-again",
            prompt=(),
            sampling=Sampling(max_tokens=1, temperature=0.0),
            owner=group.job.owner,
            priority=BEHIND,
            cache_salt=group.job.cache_salt,
        )
        made = Group(job, _nobody, group.loop, ids)
        made.quiet = True
        answer = Continuation(job, 0, ids, vocabulary=self._runner.vocabulary, ends=frozenset(), room=1)
        made.sequences.append(Sequence(made, 0, (BEHIND, 0, 0), answer))
        return made


def _nobody(step: Step) -> None:
    """Takes what a quiet job would say."""
