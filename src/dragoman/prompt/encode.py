"""Text and prompts to token ids."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from dragoman.engines.protocol import Tokenizer
from dragoman.engines.sound import encoded
from dragoman.errors import SUFFIX, BadRequest, ContextOverflow
from dragoman.prompt.special import SpecialText, erase
from dragoman.types import TextPrompt

SHORT = 16
"""Characters of a piece whose ids are kept: templates write the same between their control tokens."""
MOST_KEPT = 1024
AT_ONCE = 256 * 1024


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class Encoder:
    """Encodes with one model's tokenizer; knows its control tokens."""

    def __init__(self, tokenizer: Tokenizer, most: int | None = None) -> None:
        """`most` is how many ids a text may have, whatever it is for."""
        self._most = most
        self.special = SpecialText(tokenizer.special)
        self._tokenizer = tokenizer
        # Some tokenizers write the first word of a prompt in another way than those after it.
        self._encode_on: Callable[[str], list[int]] = getattr(tokenizer, "encode_on", tokenizer.encode)
        self._encode_short = lru_cache(MOST_KEPT)(self._encode_kept)
        self._longest = max(map(len, tokenizer.pieces), default=1) or 1
        self.bos = self._piece(tokenizer.bos_id)
        self.eos = self._piece(tokenizer.eos_id)

    def encode_special(self, text: str, mark: str | None = None) -> list[int]:
        """Ids of a text in which control tokens count as such: `<s>a` gives that of `<s>` first.

        A text of more ids than anybody has a use for is refused before anything is made of them.
        """
        ids: list[int] = []
        for id, piece in self.special.split(replace_surrogates(text)):
            if id is not None:
                ids.append(id)
            elif plain := erase(piece, mark) if mark else piece:
                encode = self._encode_short if len(plain) <= SHORT else self._encode_piece
                found = encode(plain, not ids)
                self._check_most(len(ids) + len(found))
                # They may be millions, which one call would copy while all others wait.
                for at in range(0, len(found), AT_ONCE):
                    ids += found[at : at + AT_ONCE]
        return ids

    def _encode_piece(self, text: str, begins: bool) -> Sequence[int]:
        ids = self._tokenizer.encode(text) if begins else self._encode_on(text)
        if isinstance(ids, list):
            self._check_most(len(ids))
        return encoded(self._tokenizer, ids)

    def _check_most(self, count: int) -> None:
        if self._most is not None and count > self._most:
            raise ContextOverflow(f"The text has more than {self._most} tokens; shorten it.")

    def _encode_kept(self, text: str, begins: bool) -> Sequence[int]:
        return tuple(self._encode_piece(text, begins))

    def encode_text(self, prompt: TextPrompt) -> list[int]:
        """A raw prompt. With a suffix, the model is asked for what stands between the two."""
        ids = self.encode_special(prompt.text)
        if prompt.suffix is not None:
            if self._tokenizer.infill is None:
                raise BadRequest(
                    f"This model cannot fill a gap: '{SUFFIX}' is not supported.",
                    param=SUFFIX,
                    code="unsupported_field",
                )
            before, after, middle = self._tokenizer.infill
            ids = [before, *ids, after, *self.encode_special(prompt.suffix), middle]
        bos = self._tokenizer.bos_id
        if prompt.add_special_tokens and self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def check_length(self, prompt: str | Sequence[int], most: int | None, param: str) -> None:
        """Refuse what cannot have few enough ids before the cost of encoding it is paid."""
        if most is None:
            return
        least = len(prompt) // self._longest if isinstance(prompt, str) else len(prompt)
        if least > most:
            more = f"more than {least}" if isinstance(prompt, str) else str(least)
            message = f"The prompt has {more} tokens, but this model takes {most}; shorten it."
            raise ContextOverflow(message, param=param)

    def check_ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        most = len(self._tokenizer.pieces)
        for id in ids:
            if not 0 <= id < most:
                raise BadRequest(
                    f"Token id {id} is outside of the vocabulary (0 to {most - 1}).",
                    param=param,
                    code="invalid_token_id",
                )
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._tokenizer.pieces[id] for id in ids).decode("utf-8", "replace")

    def _piece(self, id: int | None) -> str | None:
        return None if id is None else self._tokenizer.pieces[id].decode("utf-8", "replace")
