"""A prompt that goes on from what the model itself wrote, in the very ids that it sampled.

The problem. A model samples ids, and the client's next request has their text as a message. If that is
tokenized again, the model's own words mostly become other ids than it sampled: `" wea" "ther"` becomes `"
weather"`. The engine's cache of the answer is then lost, and training data made of it is wrong.

The solution. An answered turn is kept unchanged, with prompt ids and sampled ids (`turns/plan.py`). When the
conversation comes back it is rendered once, as it is now, and its answers are looked for in that text:

    what the template writes now      <user>hi<end><bot>Hello.<end>\\n<user>and?<end><bot>
    a turn that was kept              '--- its prompt ---''- sampled -'
    the ids of the prompt             [kept: its prompt]   [kept]      [new: the rest]

1. Candidate turns are found by the messages alone: each beginning of a conversation has a digest
   (`chain_messages`), and a turn is kept under that of the messages that it answered.
2. The prompt continues the latest turn whose prompt text is a prefix of the current one: all of its ids are
   kept, earlier answers included, if what follows is what the model wrote. Mostly it is, character by
   character. If not, both are parsed: templates change spaces and the JSON of calls, and answers that parse
   alike are equal. The client's text counts: an answer that it has edited is not the model's.
3. The model's last id is mostly the end of its turn. If the template writes the same end, it is kept; if it
   writes another or none, the template's is used and the model's is left out.
4. Answers after that offset are in a text that was changed, by the template (many drop old reasoning) or by
   the client. Their ids are kept as far back from their ends as the template writes the same text. To find
   them, the conversation is rendered once more with marks (fences) around all other texts: answers are
   between these.

The ids are therefore those of the template's text, with the one exception of answers that parse alike. With
`history: "sampled"` only the sampled ids count: the ids of the latest turn whose messages are those of the
conversation, whatever the template has made of them, and then what the template writes after that answer
(`_find_tail`).

Where the text is that of the previous prompt, its ids are reused (`_find_base`): a turn costs what is new.
"""

import re
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from dragoman.dialects.declarations import Dialect, prompt_opened_reasoning, starts_in_reasoning
from dragoman.dialects.parser import Parser, parse
from dragoman.prompt.answer_regions import (
    LEAST_WORDS,
    AnswerRegion,
    find_marks,
    find_regions,
    find_suffix,
    region_before,
)
from dragoman.prompt.encode import ResumeOffsets, canonical_content, chain_messages, digest_frame, strip_mark
from dragoman.prompt.prompt_cache import (
    BreakReason,
    CachedPrompt,
    ResumePoint,
    TokenExactIds,
    TokenExactPrompt,
    TurnLookup,
)
from dragoman.types import Answer, Message, TurnRecord, fold

if TYPE_CHECKING:
    from dragoman.prompt.media_placeholders import MediaPlaceholders
    from dragoman.prompt.prompt_builder import PromptBuilder

_OPENING_IDS = 64
"""Number of last ids of a prompt that are decoded to decide whether it opened reasoning."""
_FEW = 32
"""Characters by which the text of a message is recognised; also the maximum number of resume offsets."""
_CLOSES = re.compile(r"(?!.*header)(?:.*end|.*eo[stm]|.*return|</s>)", re.IGNORECASE | re.DOTALL)
"""Control tokens that end a message, by name, where the tokenizer does not declare it."""


class ContinuedTurn(Struct, frozen=True):
    """The turn that a prompt continues."""

    turn: TurnRecord
    kept: int
    """Number of the turn's ids with which the prompt begins."""

    def followed_by(self, new: tuple[int, ...]) -> tuple[int, ...]:
        """Return the kept ids and the new ones. There may be very many, so they are copied once."""
        turn, sampled = self.turn, self.kept - len(self.turn.prompt)
        return turn.prompt + (turn.ids[:sampled] + new) if sampled > 0 else turn.prompt[: self.kept] + new

    @property
    def cut(self) -> tuple[int, ...]:
        """Ids of the turn that are not kept."""
        sampled = self.kept - len(self.turn.prompt)
        return (
            self.turn.ids[sampled:] if sampled >= 0 else self.turn.all_ids[self.kept :] if self.kept else ()
        )


class MarkedText:
    """A rendered text with marks that are not part of its content."""

    def __init__(self, text: str, mark: str) -> None:
        self.text, self.mark = text, mark
        self.plain = strip_mark(text, mark)
        self._before, self._sizes = find_marks(text, mark) if len(text) > len(self.plain) else ([], [0])

    def slice(self, start: int, end: int | None = None) -> str:
        """Return `plain[start:end]` with its marks."""
        return self.text[self.place(start) : None if end is None else self.place(end)]

    def place(self, at: int) -> int:
        return at + self._sizes[bisect_left(self._before, at)]


class ParseContext(NamedTuple):
    """Context for parsing ids. It is separate from `TokenExactBuilder`, which holds answers: a reference to
    that would be a cycle.
    """

    prompter: "PromptBuilder"
    dialect: Dialect
    ends: dict[int, str]
    tools: tuple[dict[str, Any], ...]


class DecodedTurn:
    """The ids of a turn, decoded and parsed."""

    def __init__(self, turn: TurnRecord, of: ParseContext) -> None:
        self.turn, self._of = turn, of
        self.text = of.prompter.decode(turn.ids)
        ended = bool(turn.ids) and turn.ids[-1] in of.ends
        self.end = of.ends[turn.ids[-1]] if ended else ""
        self.body = self.text[: len(self.text) - len(self.end)]
        self.body_ids = turn.ids[:-1] if ended else turn.ids

    @cached_property
    def begun(self) -> bool:
        """Whether the prompt had opened reasoning."""
        last = self.turn.prompt[-_OPENING_IDS:]
        if not last:
            return prompt_opened_reasoning(self._of.dialect, self.body)
        return starts_in_reasoning(self._of.dialect, self._of.prompter.decode(last))

    @cached_property
    def answer(self) -> Answer:
        of, decoder = self._of, getincrementaldecoder("utf-8")("replace")
        parser = Parser(of.dialect, of.tools, self.begun, special_tokens=of.prompter.controls)
        pieces = map(decoder.decode, of.prompter.pieces(self.body_ids))
        tokens = list(zip(self.body_ids, pieces, strict=True))
        return fold([*parser.feed(tokens), *parser.finish()])

    def matches(self, message: Message) -> bool:
        """Whether the message is the answer, as it was sent (for example cut at a stop string) or as parsed
        from the ids.
        """
        if self.turn.message_digest and chain_messages([message])[-1] == self.turn.message_digest:
            return True
        return canonical_content(self.answer) == canonical_content(message)


class _ReusedPrefix(Struct):
    """End of the part of the prompt that is equal to an earlier turn."""

    after: ContinuedTurn
    rest: int
    """Offset in the text."""
    number: int
    """Number of the first message after it."""


class TokenExactBuilder:
    """One conversation as rendered now, with its known answers."""

    def __init__(
        self,
        prompter: "PromptBuilder",
        known: CachedPrompt,
        dialect: Dialect,
        ends: dict[int, str],
        memory: TurnLookup,
        salt: str,
        filling: "MediaPlaceholders | None" = None,
    ) -> None:
        """`known` is the prompt as found by `recognize`; `filling` collects the spans of its media."""
        conversation, rendering = known.conversation, known.rendering
        self.now = MarkedText(rendering.text, rendering.mark)
        self._tongue = ParseContext(prompter, dialect, ends, conversation.tools)
        self._prompter, self._known, self._conversation = prompter, known, conversation
        self._memory, self._salt, self._filling = memory, salt, filling
        self._frame = digest_frame(conversation)
        self.links = known.chain.upto(conversation.messages).links
        self._numbers = [
            number for number, message in enumerate(conversation.messages) if message.role == "assistant"
        ]
        self._wrote: dict[int, list[DecodedTurn]] = {}

    @property
    def known(self) -> bool:
        """Whether any of the answers is known."""
        return any(self._answers(number) for number in reversed(self._numbers))

    def _answers(self, number: int) -> list[DecodedTurn]:
        if number not in self._wrote:
            turns = self._memory.find_by_messages(self.links[number], self._salt)
            shown = {media.digest for media in self._conversation.media.values()}
            seen = [turn for turn in turns if all(span.media.digest in shown for span in turn.media)]
            self._wrote[number] = [DecodedTurn(turn, self._tongue) for turn in seen]
        return self._wrote[number]

    @cached_property
    def _regions(self) -> dict[int, AnswerRegion]:
        now, fence = self.now, partial(self._prompter.render_fenced, self._known)
        regions = find_regions(now.text, now.mark, len(now.plain), fence)
        return dict(zip(self._numbers, regions, strict=True)) if len(regions) == len(self._numbers) else {}

    # Following the template

    def build_rendered(self) -> TokenExactPrompt:
        prompt = self._stitch(self._find_base(), cuts := list[ResumePoint]())
        spans = tuple(self._filling.spans) if self._filling else ()
        self._known.stitched = TokenExactIds(prompt.ids, prompt.text, tuple(cuts), spans)
        return prompt

    def _stitch(self, base: _ReusedPrefix, cuts: list[ResumePoint]) -> TokenExactPrompt:
        """Build the prompt; the offsets from which it can be encoded anew are appended to `cuts`."""
        kept_ids, offset, ids, borders = base.after.kept, base.rest, list[int](), ResumeOffsets()
        cuts.append(ResumePoint(self.now.place(offset), offset, kept_ids, base.number))
        if self._filling is not None:
            self._filling.go_on(base.after.turn.media, kept_ids)
        for start, end, kept, number in self._find_kept(base):
            ids += self._encode(offset, start, kept_ids + len(ids))
            ids += kept
            offset = end
            cuts.append(ResumePoint(self.now.place(offset), offset, kept_ids + len(ids), number + 1))
        ids += self._encode(offset, None, kept_ids + len(ids), borders)
        cuts += self._cuts_behind(cuts[-1], borders[-_FEW:])
        shown = self._prompter.engine_text(self.now.text, self.now.mark, self.now.plain)
        whole_ids = base.after.followed_by(self._prompter.share(ids))
        return TokenExactPrompt(shown, whole_ids, self._after(base), self._why_split(base))

    def _cuts_behind(self, last: ResumePoint, borders: ResumeOffsets) -> Iterator[ResumePoint]:
        """Yield offsets after control tokens, if no marks follow. All answers before them were checked."""
        if len(self.now.text) - last.chars == len(self.now.plain) - last.plain:
            seen = len(self._conversation.messages), self._prompter.margin
            yield from (
                ResumePoint(last.chars + at, last.plain + at, last.ids + ids, *seen) for at, ids in borders
            )

    def _after(self, base: _ReusedPrefix) -> ContinuedTurn | None:
        """Return the last answer, if it is known. Ids that the prompt has from other
        turns are not reported.
        """
        last = self._last
        if last is None or base.number > last:
            return base.after if base.after.kept else None
        records = [wrote.turn for wrote in self._saying(last)]
        if any(turn is base.after.turn for turn in records):
            return base.after
        return ContinuedTurn(records[0], 0) if records else None

    def _why_split(self, base: _ReusedPrefix) -> BreakReason:
        last = self._last
        if last is None or base.number > last:
            return "end" if base.after.cut else ""
        if not self._answers(last):
            return "client" if self.known else "unknown"
        turns = self._saying(last)
        if not turns:
            return "client"
        return "template" if any(map(self._framed, turns)) else "tools"

    @cached_property
    def _last(self) -> int | None:
        """Number of the last answer's message; a beginning of one that the client wrote does not count."""
        begun = self._conversation.continue_final_message and not self._answers(self._numbers[-1])
        numbers = self._numbers[:-1] if begun else self._numbers
        return numbers[-1] if numbers else None

    def _encode(
        self, start: int, end: int | None, at: int, borders: ResumeOffsets | None = None
    ) -> list[int]:
        """Encode text after `at` ids."""
        encode: Callable[..., list[int]] = partial(self._prompter.encode_special, mark=self.now.mark)
        if self._filling is not None:
            encode = partial(self._filling.encode, encode, at)
        return encode(self.now.slice(start, end), begins=not at, borders=borders)

    def _find_base(self) -> _ReusedPrefix:
        known, last = self._known.stitched or TokenExactIds((), "", ()), self._last or 0
        # The last offset before the last answer up to which the ids are those of the previous prompt.
        cut = next((cut for cut in reversed(known.cuts) if cut.number <= last), ResumePoint(0, 0, 0, 0))
        for number in reversed(self._numbers):
            if number < cut.number:
                break
            fits = self._fitting(number)
            seams = [seam for wrote, at in fits if (seam := self._seam(wrote, at, number)) is not None]
            if seams:
                _, after, rest = min(seams, key=lambda seam: seam[0])
                return _ReusedPrefix(after, rest, number + 1)
            if fits:
                wrote, at = fits[0]
                return _ReusedPrefix(ContinuedTurn(wrote.turn, len(wrote.turn.prompt)), at, number)
        before = TurnRecord(prompt=known.ids[: cut.ids], ids=(), media=known.media)
        return _ReusedPrefix(ContinuedTurn(before, cut.ids), cut.plain, cut.number)

    def _fitting(self, number: int) -> list[tuple[DecodedTurn, int]]:
        """Return answers whose prompt is a prefix of the text, with the offset where that ends."""
        turns = {wrote.turn.prompt_key: wrote.turn for wrote in self._answers(number)}
        positions = {key: self._begins(turn) for key, turn in turns.items()}
        items = ((wrote, positions[wrote.turn.prompt_key]) for wrote in self._answers(number))
        return [(wrote, at) for wrote, at in items if at is not None]

    def _begins(self, turn: TurnRecord) -> int | None:
        """Return the characters of the turn's prompt, if the text begins with them."""
        before, plain = self._known.stitched, self.now.plain
        if before is not None and turn.prompt is before.ids:
            return len(before.text) if plain.startswith(before.text) else None
        return self._memory.matching_prefix(turn, plain, self._salt)

    def _seam(
        self, wrote: DecodedTurn, at: int, number: int
    ) -> tuple[tuple[int, int], ContinuedTurn, int] | None:
        """Return where the rest begins, if the answer is at this offset, with a rank: lower is better."""
        turn, plain = wrote.turn, self.now.plain
        before, whole = len(turn.prompt), ContinuedTurn(turn, turn.total_ids)
        body = at + len(wrote.body)
        outcome = plain.startswith(wrote.body, at) and self._keeps_apart(at, body, wrote.body_ids)
        if outcome and wrote.end and plain.startswith(wrote.end, body) and self._closes(body):
            return (0, -body), whole, body + len(wrote.end)
        kept = ContinuedTurn(turn, before + len(wrote.body_ids))
        if outcome and self._closes(body):
            return (1, -body), kept, body
        end = self._find_alike(wrote, at, number)
        if end is not None:
            if wrote.end and plain.startswith(wrote.end, end):
                return (2, 0), whole, end + len(wrote.end)
            return (2, 1), kept, end
        if outcome:
            return (3, -body), kept, body
        return self._cut_seam(wrote, at, number)

    def _cut_seam(
        self, wrote: DecodedTurn, at: int, number: int
    ) -> tuple[tuple[int, int], ContinuedTurn, int] | None:
        """Do the same for an answer of which the client got less than was sampled, up to a stop string."""
        count, offset, text = 0, 0, self.now.plain[at : at + len(wrote.body)].encode("utf-8", "surrogatepass")
        for piece in self._prompter.pieces(wrote.body_ids):
            if not text.startswith(piece, offset):
                break
            count, offset = count + 1, offset + len(piece)
        rest = at + len(text[:offset].decode("utf-8", "ignore"))
        if not count or not self._closes(rest) or not wrote.matches(self._conversation.messages[number]):
            return None
        apart = self._keeps_apart(at, rest, wrote.body_ids[:count])
        return (
            ((4, -rest), ContinuedTurn(wrote.turn, len(wrote.turn.prompt) + count), rest) if apart else None
        )

    def _closes(self, at: int) -> bool:
        """Whether only text of the template can follow."""
        following = self.now.slice(at).lstrip() if at < len(self.now.plain) else ""
        return not following or next(self._prompter.split_special(following))[0] is not None

    def _keeps_apart(self, start: int, end: int, ids: Sequence[int]) -> bool:
        """Whether control tokens among the ids are not in text that a client wrote."""
        written = self.now.slice(start, end)
        if len(written) == end - start:
            return True
        numbers = [id_ for id_, _ in self._prompter.split_special(written) if id_ is not None]
        return numbers == [id_ for id_ in ids if id_ in self._prompter.controls]

    def _find_alike(self, wrote: DecodedTurn, at: int, number: int) -> int | None:
        """Return where the text of the answer ends, if it parses to what the model wrote."""
        tried, answer = set[int](), wrote.answer
        for end in self._ends_after(wrote, at, number):
            if end not in tried:
                tried.add(end)
                read = parse(self.now.plain[at:end], self._tongue.dialect, self._tongue.tools, wrote.begun)
                if read.reasoning.strip() == answer.reasoning.strip() and canonical_content(
                    read
                ) == canonical_content(answer):
                    return end
        return None

    def _ends_after(self, wrote: DecodedTurn, at: int, number: int) -> Iterator[int]:
        ends = [offset for end in self._tongue.ends.values() if (offset := self.now.plain.find(end, at)) >= 0]
        if ends:
            yield min(ends)
        region = self._region(wrote, at, number)
        if region is not None and region.end > at:
            closing = self._find_closing(at, region.end)
            yield from closing[:1] if closing else (self._find_opening(wrote, at, region.end), region.end)

    def _region(self, wrote: DecodedTurn, at: int, number: int, follows: bool = True) -> AnswerRegion | None:
        """Return the region of an answer; `follows` means that it is after this offset, with only template
        text between.
        """
        words = self._words_after(number) if follows else ""
        return region_before(words, self.now.plain, at, wrote.body) or self._regions.get(number)

    def _find_opening(self, wrote: DecodedTurn, at: int, end: int) -> int:
        """Return the last token before the end that is after the answer's last words:
        it opens what follows.
        """
        last, offset, number = wrote.body.rstrip()[-LEAST_WORDS:], at, end
        for id_, piece in self._prompter.split_special(self.now.slice(at, end)):
            if id_ is not None and self.now.plain[at:offset].rstrip().endswith(last):
                number = offset
            offset += len(strip_mark(piece, self.now.mark))
        return number

    def _words_after(self, number: int) -> str:
        """Return the first words of the message after an answer, if the model did not write it."""
        following = self._conversation.messages[number + 1 : number + 2]
        return (
            canonical_content(following[0])[0][:_FEW]
            if following and following[0].role != "assistant"
            else ""
        )

    def _find_closing(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the last token between two offsets that ends a message and does not
        open the one at the end.
        """
        offset, pair = start, None
        for id_, piece in self._prompter.split_special(self.now.slice(start, end)):
            size = len(strip_mark(piece, self.now.mark))
            following = self.now.plain[offset + size : end]
            if self._closing(id_, piece) and (following.strip() or end == len(self.now.plain)):
                pair = offset, offset + size
            offset += size
        return pair

    def _closing(self, id_: int | None, piece: str) -> bool:
        return id_ is not None and (id_ in self._tongue.ends or _CLOSES.match(piece) is not None)

    # Following the samples

    def build_sampled(self) -> TokenExactPrompt | None:
        """Return the ids of the latest turn whose messages begin the conversation, and what is new since;
        None if unknown.
        """
        for number in reversed(self._numbers):
            for wrote in self._saying(number):
                base = self._find_tail(wrote, number) if self._framed(wrote) else None
                if base is not None:
                    before = self._prompter.decode(wrote.turn.all_ids[: base.after.kept])
                    prompt = self._stitch(base, [])
                    return msgspec.structs.replace(prompt, text=before + self.now.plain[base.rest :])
        return None

    def _saying(self, number: int) -> list[DecodedTurn]:
        """Return the answers that match the message."""
        return [
            wrote for wrote in self._answers(number) if wrote.matches(self._conversation.messages[number])
        ]

    def _framed(self, wrote: DecodedTurn) -> bool:
        """Whether only messages can have changed since the answer."""
        if self._memory.same_frame(wrote.turn, self._frame):
            return True
        return self._memory.matching_prefix(wrote.turn, self.now.plain, self._salt) is not None

    def _find_tail(self, wrote: DecodedTurn, number: int) -> _ReusedPrefix | None:
        """Return where the new part begins: after the text of the answer and its end."""
        whole = ContinuedTurn(wrote.turn, wrote.turn.total_ids)
        messages = self._conversation.messages
        for seen, at in self._fitting(number):
            if seen is wrote and (seam := self._seam(wrote, at, number)) is not None:
                _, after, rest = seam
                # A turn that the model is to continue has no end.
                if number == len(messages) - 1 and self._conversation.continue_final_message:
                    return _ReusedPrefix(after, rest, number + 1)
                ended = wrote.end and after.kept < whole.kept
                return _ReusedPrefix(whole, self._behind_closing(rest, number) if ended else rest, number + 1)
        region = self._regions.get(number)
        if region is None or region.after != sum(one.role != "assistant" for one in messages[number:]):
            return None
        tail = self._behind_answer(wrote, region, number)
        return None if tail is None else _ReusedPrefix(whole, tail, number + 1)

    def _behind_answer(self, wrote: DecodedTurn, region: AnswerRegion, number: int) -> int | None:
        """Find the end of an answer by its last ids; else by the last token that ends a message there; else
        by the ids before its end.
        """
        span = region.start, region.end
        parts = self._suffix_in(wrote.turn.ids, *span, last=region.alone)
        if parts is not None and (
            region.alone or self._prompter.decode(parts[2]).removesuffix(wrote.end).strip()
        ):
            return parts[1]
        closing = self._find_closing(*span) if region.alone else None
        if closing is not None:
            return closing[1] if wrote.end else closing[0]
        parts = self._suffix_in(wrote.body_ids, *span, last=region.alone)
        return self._behind_closing(parts[1], number) if parts is not None else None

    def _behind_closing(self, at: int, number: int) -> int:
        """Return the offset after the end that the template writes where the model sampled another one.

        Some models end a turn with what opens the next one: that stays.
        """
        text = self.now.slice(at)
        space = len(text) - len(text.lstrip())
        id_, piece = next(self._prompter.split_special(text[space:]), (None, ""))
        end = at + space + len(piece)
        words = self._words_after(number)
        opens = words and self.now.plain[end : end + 2 * _FEW].lstrip().startswith(words)
        return end if self._closing(id_, piece) and not opens else at

    # Answers in a changed text

    def _find_kept(self, base: _ReusedPrefix) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
        """Yield for answers after the base: start, end, the kept ids, and the number of the message."""
        offset = base.rest
        for number in self._numbers:
            if number < base.number:
                continue
            turn = next(iter(self._saying(number)), None)
            region = self._region(turn, offset, number, number == base.number) if turn else None
            if turn is None or region is None:
                continue
            suffix = self._find_suffix(turn, max(region.start, offset), region)
            if suffix is not None:
                offset = suffix[1]
                yield *suffix, number

    def _find_suffix(
        self, wrote: DecodedTurn, start: int, region: AnswerRegion
    ) -> tuple[int, int, tuple[int, ...]] | None:
        """Return as much of the end of an answer as is between two offsets."""
        texts = [wrote.turn.ids, wrote.body_ids] if wrote.end else [wrote.turn.ids]
        for ids in texts:
            end = region.end
            if ids is wrote.body_ids and (closing := self._find_closing(start, end)):
                end = closing[0]
            parts = self._suffix_in(ids, start, end, last=region.alone)
            if parts is not None:
                return parts
        return None

    def _suffix_in(
        self, ids: tuple[int, ...], start: int, end: int, *, last: bool
    ) -> tuple[int, int, tuple[int, ...]] | None:
        if (suffix := find_suffix(self._prompter.pieces(ids), self.now.plain[start:end], last=last)) is None:
            return None
        first, size, number = suffix
        position, kept = (start + first, start + first + size), ids[number:]
        return (*position, kept) if self._keeps_apart(*position, kept) else None
