"""Key-value memory in pages, known by what is in them, and sequences that are kept in such pages."""

from collections import Counter, OrderedDict
from hashlib import blake2b

from msgspec import Struct

from dragoman.engines.choosing import Ids
from dragoman.engines.local.memory import Memory, common
from dragoman.engines.local.runner import PagedRunner
from dragoman.engines.local.sequence import Sequence, Slot

# Pages. Each is known by a hash of its tokens and of the page before it, so equal beginnings meet in the
# same pages, whoever computed them. Rules:
#
# - A page has as many users as sequences that read it. Its first user may write behind what it has published.
# - A page that nobody uses stays known until the memory is needed. Then the owner with the most pages gives
#   up the one that it left first, so that no flood of one drives out what all others have.
# - A page that is equal in part is copied by who wants to go on from there: nobody writes into
#   another's page.


# Pages after one that are looked through for one that is equal in part; the newest are most likely to be.
_LOOKED_AT = 16


class KnownPrefix(Struct):
    """How much of a prompt is there."""

    pages: list[int]
    chain: list[bytes]
    """One hash more than pages: the first stands for what is shared only within a namespace."""
    part: int | None = None
    """A page whose first tokens go on from there, and how many."""
    part_length: int = 0


class _Content(Struct):
    parent: bytes
    tokens: Ids
    name: bytes
    """The hash, where the page is full; it is empty where it is not."""


class PageStore:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._users = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._left: dict[str, OrderedDict[int, None]] = {}
        self._unused = 0
        """Pages in `_left`, of all owners."""
        self._owner = [""] * count
        self._held: Counter[str] = Counter()
        """Pages of each owner, used or left."""
        self._content: dict[int, _Content] = {}
        self._named: dict[bytes, int] = {}
        self._after: dict[bytes, dict[int, Ids]] = {}

    @property
    def available(self) -> int:
        """Pages that nobody uses."""
        return len(self._free) + self._unused

    def find(self, root: bytes, prompt: Ids) -> KnownPrefix:
        """The pages that hold the beginning of `prompt`."""
        found = KnownPrefix([], [root])
        for start in range(0, prompt.size, self.size):
            tokens = prompt[start : start + self.size]
            name = _name(found.chain[-1], tokens)
            page = self._named.get(name) if tokens.size == self.size else None
            if page is None:
                found.part, found.part_length = self._equal_in_part(found.chain[-1], tokens)
                break
            found.pages.append(page)
            found.chain.append(name)
        return found

    def take(self, owner: str = "") -> int | None:
        """A page to write into; None where all are in use."""
        if self._free:
            page = self._free.pop()
        elif self._left:
            page = next(iter(self._left[max(self._left, key=self._held.__getitem__)]))
            self._take_out(page)
            self._held[self._owner[page]] -= 1
            self._disown(page)
        else:
            return None
        self._users[page] = 1
        self._owner[page] = owner
        self._held[owner] += 1
        return page

    def use(self, page: int) -> None:
        if not self._users[page]:
            self._take_out(page)
        self._users[page] += 1

    def leave(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page]:
            return
        owner = self._owner[page]
        if page in self._content:
            self._left.setdefault(owner, OrderedDict())[page] = None
            self._unused += 1
        else:
            self._held[owner] -= 1
            self._free.append(page)

    def _take_out(self, page: int) -> None:
        """Of those that nobody uses."""
        mine = self._left[self._owner[page]]
        del mine[page]
        self._unused -= 1
        if not mine:
            del self._left[self._owner[page]]

    def publish(self, page: int, parent: bytes, tokens: Ids) -> bytes:
        """Tell what a page holds, after which others; the hash that stands for all of it."""
        name = _name(parent, tokens)
        full = tokens.size == self.size
        self._disown(page)
        if full and name in self._named:
            return name
        if full:
            self._named[name] = page
        self._content[page] = _Content(parent, tokens, name if full else b"")
        self._after.setdefault(parent, {})[page] = tokens
        return name

    def withdraw(self, page: int) -> None:
        """What a page in use holds is of use to no other sequence."""
        self._disown(page)

    def _disown(self, page: int) -> None:
        content = self._content.pop(page, None)
        if content is None:
            return
        self._named.pop(content.name, None)
        siblings = self._after[content.parent]
        del siblings[page]
        if not siblings:
            del self._after[content.parent]

    def _equal_in_part(self, parent: bytes, tokens: Ids) -> tuple[int | None, int]:
        best, most = None, 0
        siblings = self._after.get(parent, {})
        for page, _ in zip(reversed(siblings), range(_LOOKED_AT), strict=False):
            length = common(tokens, siblings[page])
            if length > most:
                best, most = page, length
        return best, most


def root_of(namespace: object) -> bytes:
    """Where the pages of a namespace begin. Equal namespaces are written alike."""
    return blake2b(repr(namespace).encode(), digest_size=16).digest()


def _name(parent: bytes, tokens: Ids) -> bytes:
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


# Sequences in pages: what of a prompt is already there, and room for more as they grow.
#
# Rules:
# - A prefix is shared only within a namespace: the same adapters, the same salt.
# - The last token of a prompt is always computed again, because its logits are needed.
# - A sequence starts when there is room for its prompt, and for one page more of each that runs.
# - Where a runner computes answers in another way than prompts, only prompts are shared: what is found in
#   pages is then the same, to the bit, as what would be computed.


class Paging(Memory):
    """For runners with pages."""

    def __init__(self, runner: PagedRunner) -> None:
        super().__init__(runner)
        self._runner = runner
        self._store = PageStore(runner.pages, runner.page)

    @property
    def used(self) -> float:
        return 1 - self._store.available / self._runner.pages

    def place(self, sequence: Sequence) -> bool:
        if self.must_wait(sequence):
            return False
        reusable = sequence.prompt_logprobs is None and not sequence.suspect
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

    def has(self, slot: Slot | None, length: int) -> bool:
        return slot is not None and len(slot.pages) * self._runner.page >= length

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
        sequence = slot.sequence
        if self._runner.rereads and sequence is not None and slot.length > sequence.prompt_length:
            # All that is shared was there when the prompt had been read.
            return
        for number in range(len(slot.chain) - 1, self._count_shared(slot) // self._runner.page):
            slot.chain.append(self._publish(slot, number))
        if sequence is not None and slot.length == sequence.prompt_length:
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

    def distrust(self, slot: Slot) -> None:
        for page in slot.pages:
            self._store.withdraw(page)

    def clear(self) -> None:
        self._store = PageStore(self._runner.pages, self._runner.page)

    def _fill(self, slot: Slot, found: KnownPrefix, owner: str) -> None:
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
        tokens = slot.ids[number * size : min((number + 1) * size, self._count_shared(slot))].copy()
        return self._store.publish(slot.pages[number], slot.chain[number], tokens)

    def _publish_end(self, slot: Slot) -> None:
        number, rest = divmod(self._count_shared(slot), self._runner.page)
        if rest:
            self._publish(slot, number)

    def _count_shared(self, slot: Slot) -> int:
        """How many tokens of a slot others can build on."""
        if not self._runner.rereads or slot.sequence is None:
            return slot.length
        return min(slot.length, slot.sequence.asked)

    def _leave(self, pages: list[int]) -> None:
        for page in pages:
            self._store.leave(page)

    def _pages(self, length: int) -> int:
        return -(-length // self._runner.page)
