"""Sequences in pages: what of a prompt is already there, and room for more as they grow.

Rules of this file:
- A prefix is shared only within a namespace: the same adapters, the same salt.
- The last token of a prompt is always computed again, because its logits are needed.
- A sequence starts when there is room for its prompt, and for one page more of each that runs.
- Where a runner computes answers in another way than prompts, only prompts are shared: what is found in pages
  is then the same, to the bit, as what would be computed.
"""

from dragoman.engines.local.memory import Memory
from dragoman.engines.local.pages import Found, PageStore, root_of
from dragoman.engines.local.runner import PagedRunner
from dragoman.engines.local.sequence import Sequence, Slot


class Paging(Memory):
    """For runners with pages."""

    def __init__(self, runner: PagedRunner) -> None:
        super().__init__(runner)
        self._runner = runner
        self._store = PageStore(runner.pages, runner.page)

    def place(self, sequence: Sequence) -> bool:
        if self.must_wait(sequence):
            return False
        reusable = sequence.prompt_logprobs is None
        prompt = sequence.prompt[:-1] if reusable else sequence.prompt[:0]
        found = self._store.find(root_of(sequence.group.namespace), prompt)
        length = len(found.pages) * self._runner.page + found.part_length
        if reusable and self.hold(sequence, length):
            return False
        used = [*found.pages, *([] if found.part is None else [found.part])]
        for page in used:
            self._store.use(page)
        running = len(self.slots) - self.idle
        if self._pages(sequence.prompt_length) - len(found.pages) + running > self._store.available:
            self._leave(used)
            self.full = True
            return False
        slot = next(slot for slot in self.slots if slot.sequence is None)
        self._fill(slot, found, sequence.owner)
        self._lengthen(slot, sequence.prompt_length, sequence.owner)
        slot.ids[:length] = sequence.prompt[:length]
        self.occupy(slot, sequence, length)
        return True

    def extend(self, slot: Slot, length: int) -> bool:
        assert slot.sequence is not None
        return self._lengthen(slot, length, slot.sequence.owner)

    def _lengthen(self, slot: Slot, length: int, owner: str) -> bool:
        while len(slot.pages) < self._pages(length):
            page = self._store.take(owner)
            if page is None:
                return False
            slot.pages.append(page)
        return True

    def written(self, slot: Slot) -> None:
        """Full pages are published, and the end of a prompt, on which further answers can build."""
        for number in range(len(slot.chain) - 1, self._shared(slot) // self._runner.page):
            slot.chain.append(self._publish(slot, number))
        if slot.sequence is not None and slot.length == slot.sequence.prompt_length:
            self._publish_end(slot)

    def release(self, slot: Slot) -> None:
        if slot.pages:
            self._publish_end(slot)
        self.forget(slot)
        super().release(slot)

    def forget(self, slot: Slot) -> None:
        """What was published before the step is as it was: a step writes behind it."""
        # The end goes first, because it is of less use than what it builds on.
        self._leave(slot.pages[::-1])
        slot.pages, slot.chain, slot.length = [], [], 0

    def _fill(self, slot: Slot, found: Found, owner: str) -> None:
        """Let a slot read the pages that were found, and write into a copy of the last."""
        slot.pages, slot.chain = found.pages, found.chain
        if found.part is None:
            return
        page = self._store.take(owner)
        assert page is not None
        self._runner.copy_page(found.part, page)
        self._store.leave(found.part)
        slot.pages.append(page)

    def _publish(self, slot: Slot, number: int) -> bytes:
        size = self._runner.page
        tokens = slot.ids[number * size : min((number + 1) * size, self._shared(slot))].copy()
        return self._store.publish(slot.pages[number], slot.chain[number], tokens)

    def _publish_end(self, slot: Slot) -> None:
        number, rest = divmod(self._shared(slot), self._runner.page)
        if rest:
            self._publish(slot, number)

    def _shared(self, slot: Slot) -> int:
        """How many tokens of a slot others can build on."""
        if not self._runner.rereads or slot.sequence is None:
            return slot.length
        return min(slot.length, slot.sequence.asked)

    def _leave(self, pages: list[int]) -> None:
        for page in pages:
            self._store.leave(page)

    def _pages(self, length: int) -> int:
        return -(-length // self._runner.page)
