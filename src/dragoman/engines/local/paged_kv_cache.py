"""The paged KV cache: pages identified by their contents, and sequences stored in pages."""

from collections import Counter, OrderedDict
from hashlib import blake2b

from msgspec import Struct

from dragoman.engines.local.kv_cache import KVCache, common_prefix_length
from dragoman.engines.local.runner import PagedRunner
from dragoman.engines.local.sequence import Sequence, Slot
from dragoman.engines.sampling import Ids

# Pages. Each is identified by a hash of its tokens and of the page before it, so equal prefixes share pages,
# whichever sequence computed them. Rules:
#
# - A page has as many users as sequences that read it. Its first user may write behind what it has published.
# - A page without users stays cached until its memory is needed. Then the owner with the most pages loses the
#   one it released first, so that one owner's flood does not evict the pages of all others.
# - A sequence that continues from a partly equal page copies it: it never writes into another's page.


# Successors of a page that are searched for a partly equal one; the newest are the likeliest.
_LOOKED_AT = 16


class CachedPrefix(Struct):
    """The cached prefix of a prompt."""

    pages: list[int]
    chain: list[bytes]
    """Hashes, one more than pages: the first identifies the namespace."""
    part: int | None = None
    """A page whose first `part_length` tokens continue the prefix."""
    part_length: int = 0


class _Content(Struct):
    parent: bytes
    tokens: Ids
    name: bytes
    """Hash of a full page; empty otherwise."""


class KVPagePool:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._users = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._left: dict[str, OrderedDict[int, None]] = {}
        self._unused = 0
        """Number of pages in `_left`, of all owners."""
        self._owner = [""] * count
        self._held: Counter[str] = Counter()
        """Pages of each owner, used or cached."""
        self._content: dict[int, _Content] = {}
        self._named: dict[bytes, int] = {}
        self._after: dict[bytes, dict[int, Ids]] = {}

    @property
    def available(self) -> int:
        """Number of pages without users."""
        return len(self._free) + self._unused

    def find(self, root: bytes, prompt: Ids) -> CachedPrefix:
        """Find the pages that hold a prefix of `prompt`."""
        prefix = CachedPrefix([], [root])
        for start in range(0, prompt.size, self.size):
            tokens = prompt[start : start + self.size]
            name = _name(prefix.chain[-1], tokens)
            page = self._named.get(name) if tokens.size == self.size else None
            if page is None:
                prefix.part, prefix.part_length = self._equal_in_part(prefix.chain[-1], tokens)
                break
            prefix.pages.append(page)
            prefix.chain.append(name)
        return prefix

    def take(self, owner: str = "") -> int | None:
        """Allocate a page to write into, evicting one if needed; None if all are in use."""
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
        """Remove a page from those without users."""
        mine = self._left[self._owner[page]]
        del mine[page]
        self._unused -= 1
        if not mine:
            del self._left[self._owner[page]]

    def register(self, page: int, parent: bytes, tokens: Ids) -> bytes:
        """Make a page's contents available to others, after those of `parent`; return the hash of the
        whole prefix.
        """
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
        """Make a page in use unavailable to other sequences."""
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
            length = common_prefix_length(tokens, siblings[page])
            if length > most:
                best, most = page, length
        return best, most


def root_of(namespace: object) -> bytes:
    """Return the hash at which the pages of a namespace begin. Equal namespaces have equal `repr`."""
    return blake2b(repr(namespace).encode(), digest_size=16).digest()


def _name(parent: bytes, tokens: Ids) -> bytes:
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


# Sequences in pages: the cached prefix of a prompt, and more pages as sequences grow.
#
# Rules:
# - A prefix is shared only within a namespace: the same adapters, the same salt.
# - The last token of a prompt is always computed again, because its logits are needed.
# - A sequence starts when there is memory for its prompt, and for one more page of each running sequence.
# - If a runner computes answers differently from prompts, only prompts are shared: cached pages are then
#   bit-identical to what would be computed.


class PagedKVCache(KVCache):
    """The KV cache of runners with pages."""

    def __init__(self, runner: PagedRunner) -> None:
        super().__init__(runner)
        self._runner = runner
        self._store = KVPagePool(runner.pages, runner.page)

    @property
    def used(self) -> float:
        return 1 - self._store.available / self._runner.pages

    def allocate(self, sequence: Sequence) -> bool:
        if self.must_wait(sequence):
            return False
        reusable = sequence.prompt_logprobs is None and not sequence.suspect
        prompt = sequence.prompt[:-1] if reusable else sequence.prompt[:0]
        prefix = self._store.find(root_of(sequence.group.namespace), prompt)
        length = len(prefix.pages) * self._runner.page + prefix.part_length
        if reusable and self.wait_for_prefix(sequence, length):
            return False
        used = [*prefix.pages, *([] if prefix.part is None else [prefix.part])]
        for page in used:
            self._store.use(page)
        running = len(self.slots) - self.idle
        if self._pages(sequence.prompt_length) - len(prefix.pages) + running > self._store.available:
            self._leave(used)
            self.full = True
            return False
        slot = next(slot for slot in self.slots if slot.sequence is None)
        self._fill(slot, prefix, sequence.owner)
        self._lengthen(slot, sequence.prompt_length, sequence.owner)
        slot.ids[:length] = sequence.prompt[:length]
        self.occupy(slot, sequence, length)
        return True

    def has(self, slot: Slot | None, length: int) -> bool:
        return slot is not None and len(slot.pages) * self._runner.page >= length

    def reserve(self, slot: Slot, length: int) -> bool:
        assert slot.sequence is not None
        return self._lengthen(slot, length, slot.sequence.owner)

    def _lengthen(self, slot: Slot, length: int, owner: str) -> bool:
        while len(slot.pages) < self._pages(length):
            page = self._store.take(owner)
            if page is None:
                return False
            slot.pages.append(page)
        return True

    def commit(self, slot: Slot) -> None:
        """Publish full pages, and the end of a prompt, so that other sequences can use them."""
        sequence = slot.sequence
        if self._runner.decode_kv_differs and sequence is not None and slot.length > sequence.prompt_length:
            # Everything that can be shared was published when the prompt was computed.
            return
        for number in range(len(slot.page_hashes) - 1, self._count_shared(slot) // self._runner.page):
            slot.page_hashes.append(self._publish(slot, number))
        if sequence is not None and slot.length == sequence.prompt_length:
            self._publish_end(slot)

    def release(self, slot: Slot) -> None:
        if slot.pages:
            self._publish_end(slot)
        self.discard(slot)
        super().release(slot)

    def discard(self, slot: Slot) -> None:
        """Discard a sequence's pages. Pages published before the step stay valid, as a step writes behind
        them.
        """
        # The end goes first, because it is less useful than what it builds on.
        self._leave(slot.pages[::-1])
        slot.pages, slot.page_hashes, slot.length = [], [], 0

    def distrust(self, slot: Slot) -> None:
        for page in slot.pages:
            self._store.withdraw(page)

    def clear(self) -> None:
        self._store = KVPagePool(self._runner.pages, self._runner.page)

    def _fill(self, slot: Slot, prefix: CachedPrefix, owner: str) -> None:
        """Let a slot read the pages that were found, and write into a copy of the last."""
        slot.pages, slot.page_hashes = prefix.pages, prefix.chain
        if prefix.part is None:
            return
        page = self._store.take(owner)
        assert page is not None
        self._runner.copy_page(prefix.part, page)
        self._store.leave(prefix.part)
        slot.pages.append(page)

    def _publish(self, slot: Slot, number: int) -> bytes:
        size = self._runner.page
        tokens = slot.ids[number * size : min((number + 1) * size, self._count_shared(slot))].copy()
        return self._store.register(slot.pages[number], slot.page_hashes[number], tokens)

    def _publish_end(self, slot: Slot) -> None:
        number, rest = divmod(self._count_shared(slot), self._runner.page)
        if rest:
            self._publish(slot, number)

    def _count_shared(self, slot: Slot) -> int:
        """Count the tokens of a slot that other sequences can use."""
        if not self._runner.decode_kv_differs or slot.sequence is None:
            return slot.length
        return min(slot.length, slot.sequence.sent_length)

    def _leave(self, pages: list[int]) -> None:
        for page in pages:
            self._store.leave(page)

    def _pages(self, length: int) -> int:
        return -(-length // self._runner.page)
