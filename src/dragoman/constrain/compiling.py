"""Compiled constraints, kept for the next request that asks for the same. Bounded by what they take."""

from collections import OrderedDict
from threading import Lock
from weakref import WeakKeyDictionary

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import GrammarMatcher, Vocabulary
from dragoman.limits import Limits

LEAST_BYTES = 192 * 1024
"""Of the smallest grammar, compiled: measured, with some room."""


class MatcherCache:
    """Matchers at their start, by constraint, for one vocabulary. Threads may share it.

    Compiling happens outside the lock, so one large schema does not hold up the others; two threads that
    ask for the same one at once may both compile it.
    """

    def __init__(self, vocabulary: Vocabulary, most_bytes: int = Limits().grammar_cache_bytes) -> None:
        self._vocabulary = vocabulary
        self._most = most_bytes
        self._lock = Lock()
        self._kept: OrderedDict[Constraint, GrammarMatcher] = OrderedDict()
        self.bytes = 0

    def start(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher of one's own, at the beginning of an answer."""
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept.copy()
        made = constraint.start(self._vocabulary)
        fresh = made.copy()
        self._keep(constraint, made)
        return fresh

    def _keep(self, constraint: Constraint, matcher: GrammarMatcher) -> None:
        size = _size(constraint)
        if size > self._most:
            return
        with self._lock:
            if constraint not in self._kept:
                self._kept[constraint] = matcher
                self.bytes += size
            while self.bytes > self._most:
                dropped, _ = self._kept.popitem(last=False)
                self.bytes -= _size(dropped)


_CACHES: "WeakKeyDictionary[Vocabulary, MatcherCache]" = WeakKeyDictionary()
_CACHES_LOCK = Lock()


def compile_cached(
    constraint: Constraint, vocabulary: Vocabulary, most_bytes: int = Limits().grammar_cache_bytes
) -> GrammarMatcher:
    """`constraint.start(vocabulary)`, from the cache of that vocabulary if it is there."""
    with _CACHES_LOCK:
        cache = _CACHES.get(vocabulary)
        if cache is None:
            cache = _CACHES[vocabulary] = MatcherCache(vocabulary, most_bytes)
    return cache.start(constraint)


def _size(constraint: Constraint) -> int:
    """About what it takes, which llguidance does not tell: much for the least, and then with its length."""
    return LEAST_BYTES + 16 * len(constraint.grammar.encode())
