"""Log probabilities as the two APIs spell them."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Raw

from dragoman.api.sse import encode
from dragoman.turns.detokenize import Pieces
from dragoman.types import TokenLogprob

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI uses the same number."""


class Speller:
    """Spells ids as the client wants them: as text, or as `token_id:N`."""

    def __init__(self, pieces: Pieces, *, as_ids: bool = False, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._as_ids = as_ids
        self._unseen = pieces.special if skip_special else frozenset()
        self._around: dict[int, tuple[str, str]] = {}
        """What entries say before their numbers and behind them, by id."""

    def token(self, id_: int) -> str:
        if self._as_ids:
            return f"token_id:{id_}"
        return self._text(id_)

    def _text(self, id_: int) -> str:
        return self._pieces.bytes[id_].decode("utf-8", "replace")

    def chat(self, entries: Iterable[TokenLogprob]) -> list[Raw]:
        """Written already: a long answer has a million of them, and as objects they would hold up everybody.

        `{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}`
        """
        return [Raw(self._written(entry).encode()) for entry in entries]

    def _written(self, entry: TokenLogprob) -> str:
        top = ",".join([self._entry(id_, logprob) + "}" for id_, logprob in entry.top])
        return f'{self._entry(entry.id, entry.logprob)},"top_logprobs":[{top}]}}'

    def _entry(self, id_: int, logprob: float) -> str:
        """Without the brace at its end."""
        around = self._around.get(id_)
        if around is None:
            token, numbers = encode(self.token(id_)).decode(), encode(list(self._pieces.bytes[id_])).decode()
            around = self._around[id_] = f'{{"token":{token},"logprob":', f',"bytes":{numbers}'
        return f"{around[0]}{float(finite(logprob))!r}{around[1]}"

    def completions(
        self, entries: Sequence[TokenLogprob | None], ids: Sequence[int], offset: int
    ) -> dict[str, Any]:
        """`entries` may begin with None: nothing precedes the first id of a prompt."""
        offsets = []
        for id_ in ids:
            offsets.append(offset)
            offset += 0 if id_ in self._unseen else len(self._text(id_))
        return {
            "tokens": [self.token(id_) for id_ in ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> Raw:
        top = {self.token(id_): finite(logprob) for id_, logprob in entry.top}
        return Raw(encode({**top, self.token(entry.id): finite(entry.logprob)}))

    def prompt(self, entries: Sequence[TokenLogprob | None] | None) -> list[Raw | None] | None:
        """vLLM's shape: for each prompt id, what else could have stood there, by id."""
        if entries is None:
            return None
        return [None if entry is None else self._ranked(entry) for entry in entries]

    def _ranked(self, entry: TokenLogprob) -> Raw:
        found = {id_: (logprob, rank) for rank, (id_, logprob) in enumerate(entry.top, 1)}
        found.setdefault(entry.id, (entry.logprob, 0))
        told = {
            str(id_): {"logprob": finite(logprob), "rank": rank or None, "decoded_token": self.token(id_)}
            for id_, (logprob, rank) in found.items()
        }
        return Raw(encode(told))


def finite(logprob: float) -> float:
    # NaN compares false with everything, so this also keeps it out of the JSON.
    return logprob if logprob > LEAST else LEAST
