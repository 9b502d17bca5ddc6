"""The tokens of one chunk: ids, log probabilities and text, which come apart, put together."""

import re
from collections.abc import Sequence

from dragoman.client.events import Token
from dragoman.client.wire import Logprobs, Spelled

_SPELLED_ID = re.compile(r"token_id:(\d{1,10})")


def tokens_of(ids: Sequence[int] | None, entries: Sequence[Token], text: str) -> list[Token]:
    """`entries` are what `entries_of` has read. Without as many of them as there are ids, ids stand alone:
    log probabilities at the wrong tokens would be worse than none.
    """
    if not ids:
        tokens = list(entries)
    elif len(entries) == len(ids):
        tokens = [
            Token(id_, entry.text, entry.logprob, entry.top) for id_, entry in zip(ids, entries, strict=True)
        ]
    else:
        tokens = [Token(id_) for id_ in ids]
    if tokens and "".join(token.text for token in tokens) != text:
        for token in tokens:
            token.text = ""
        tokens[-1].text = text
    return tokens


def entries_of(logprobs: Logprobs | None) -> list[Token]:
    if logprobs is None:
        return []
    if logprobs.content is not None:
        return spelled_tokens(logprobs.content)
    values = logprobs.token_logprobs or []
    tops = logprobs.top_logprobs or [None] * len(values)
    return [
        _token(text, logprob, [_token(other, value) for other, value in (top or {}).items()])
        for text, logprob, top in zip(logprobs.tokens or [], values, tops, strict=False)
    ]


def spelled_tokens(entries: Sequence[Spelled]) -> list[Token]:
    return [
        _token(entry.token, entry.logprob, spelled_tokens(entry.top_logprobs or ()), entry.id)
        for entry in entries
    ]


def _token(text: str, logprob: float | None, top: list[Token] | None = None, id: int | None = None) -> Token:
    """Servers that are asked for it spell a token as `token_id:N`."""
    spelled = _SPELLED_ID.fullmatch(text)
    return Token(int(spelled[1]) if spelled else id, "" if spelled else text, logprob, top or [])
