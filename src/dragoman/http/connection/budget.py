"""Bytes that are held for clients, all of them together, and how much of it may be one key's.

A body that is not all there yet, a page that its client does not read: each is harmless, and a thousand of
them are the memory of the machine. So what is held beyond a little is counted, and refused where there is no
room, at once: who waits for room while holding some would wait for others that do the same.
"""

import asyncio
from collections import Counter, defaultdict

from dragoman.errors import Overloaded, Unavailable

FREE_BYTES = 64 * 1024
"""What everybody may hold: small requests are served however many large ones there are."""
LOADED_AT_ONCE = 2
"""Of one key; what the store gives is counted before the next is asked for."""


class Budget:
    """`budget.of(owner)` is what one request holds of it."""

    def __init__(self, most: int, keys: int, what: str) -> None:
        self.most = most
        # Of several keys, none can keep all others out.
        self.most_of_key = most if keys < 2 else -(-most // 2)
        self.held = 0
        self._what = what
        self._of_key: Counter[str] = Counter()

    def of(self, owner: str) -> "Holding":
        return Holding(self, owner)

    def check(self, owner: str, more: int = 1, own: int = 0) -> None:
        """Raises where there is no room for so many more, beside those that the same request holds.

        Who is alone has room for anything: otherwise what is larger than all of it could never be had.
        """
        mine = self._of_key[owner]
        if mine > own and mine + more > self.most_of_key and self.most_of_key < self.most:
            raise Overloaded(
                f"{self._what} of this key take {mine} bytes, and may take {self.most_of_key}; "
                "let one of them end."
            )
        if self.held > own and self.held + more > self.most:
            raise Unavailable(
                f"{self._what} take {self.held} bytes, and may take {self.most}; try again soon."
            )

    def add(self, owner: str, count: int) -> None:
        self.held += count
        self._of_key[owner] += count
        if not self._of_key[owner]:
            del self._of_key[owner]


class Replies(Budget):
    """That of what is sent. How large something stored is, is known when it is there: so few come at once."""

    def __init__(self, most: int, keys: int) -> None:
        super().__init__(most, keys, "Replies that are not read yet")
        self._loading: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(LOADED_AT_ONCE)
        )

    def loading(self, owner: str) -> asyncio.Semaphore:
        """`async with` it, what is stored is loaded: a key's next one waits until this one is counted."""
        return self._loading[owner]


class Holding:
    """What one request holds, which may grow and shrink. It must be ended, or `with` it something done."""

    def __init__(self, budget: Budget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._counted = 0

    def be(self, size: int, *, checked: bool = True) -> None:
        """From now on so many bytes are held. Raises where there is no room for them, and changes nothing."""
        more = (size if size > FREE_BYTES else 0) - self._counted
        if more > 0 and checked:
            self._budget.check(self._owner, more, self._counted)
        if more:
            self._budget.add(self._owner, more)
            self._counted += more

    def end(self) -> None:
        if self._counted:
            self.be(0)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()
