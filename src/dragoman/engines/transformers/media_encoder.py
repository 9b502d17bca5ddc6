"""Images and audio for models of `transformers`, with their own processors and encoders.

The library's continuous batching knows only ids, and shares pages with equal ids. So a medium is represented
by a range of numbers above the vocabulary that no other medium has used, which also makes its pages unique.
The model's embeddings of the medium replace those of that range in every step that has some of it. They come
from the model's own forward pass, which is run on the processor's output up to the language model, and no
further: its inputs are what it must get in a batch.

Some models attend to an image in both directions: its ids are all in one step, and attend to each other
there.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from transformers import AutoProcessor

from dragoman.errors import CONVERSATION, BadRequest, DragomanError, EngineFailed, SettingsError
from dragoman.logs import safe_message
from dragoman.media import Media, MediaKind, MediaSpan
from dragoman.media.decode import MediaDecoder, check_installed
from dragoman.owner_cache import OwnerCache

_log = logging.getLogger("dragoman.engine")
KEPT_BYTES = 256 * 1024 * 1024
"""Maximum bytes of encoded media in the cache."""
_HIGHEST = 2**31 - 1
_PLAIN = frozenset({"inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache_position"})
_DEEP = frozenset({"visual_pos_masks", "deepstack_visual_embeds"})
"""Inputs of language models for an image beyond embeddings: rows added after their first layers."""
_TRIED = 64


class _DecoderReached(Exception):
    """Carries the inputs that the language model would have got."""


class EncodedMedia(Struct):
    """Processed medium: the ids that represent it, and its embeddings once it is encoded."""

    ids: list[int]
    inputs: Mapping[str, Any]
    """Output of the processor; empty once it is encoded."""
    first: int = 0
    """First number of its range."""
    embeds: Any = None
    positions: Any = None
    """Positions in models with three dimensions, as if the prompt began here."""
    seen: Any = None
    deep: Sequence[Any] = ()
    """Rows for the first layers, at the ids that `seen` marks."""
    blocks: Sequence[tuple[int, int]] = ()
    """Ranges of ids that attend to each other in both directions: start and end."""

    @property
    def advance(self) -> int:
        """Positions that it takes."""
        return len(self.ids) if self.positions is None else int(self.positions.max()) + 1

    @property
    def weight(self) -> int:
        tensors = [*self.inputs.values(), self.embeds, self.positions, *self.deep]
        return 8 * len(self.ids) + sum(int(each.nbytes) for each in tensors if isinstance(each, torch.Tensor))


class PromptMediaView(Struct):
    """The media of one prompt, by offset."""

    parts: list[tuple[int, EncodedMedia]]

    def prompt(self, ids: Sequence[int]) -> list[int]:
        numbers = list(ids)
        for start, part in self.parts:
            numbers[start : start + len(part.ids)] = range(part.first, part.first + len(part.ids))
        return numbers

    def within(self, begin: int, end: int) -> Iterator[tuple[int, EncodedMedia, slice]]:
        """Yield the media between two offsets of the prompt: relative start, medium, and its slice."""
        for start, part in self.parts:
            low, high = max(begin, start), min(end, start + len(part.ids))
            if low < high:
                yield low - begin, part, slice(low - start, high - start)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges with bidirectional attention: start and end in the prompt."""
        for start, part in self.parts:
            yield from ((start + low, start + high) for low, high in part.blocks)

    def whole(self, begin: int, count: int) -> int:
        """Return how many of `count` ids from `begin` on fit without cutting a block."""
        end = begin + count
        cut = next((low for low, high in self.blocks() if low < end < high), end)
        return max(cut - begin, 0)

    def see_whole(self, mask: Any, begin: int) -> None:
        """Allow bidirectional attention in a step's mask, with rows for the ids from `begin` on and
        columns up to the last of them.
        """
        rows, columns = mask.shape
        behind = columns - rows - begin
        for low, high in self.blocks():
            # Values above the diagonal are added to scores; they become zero here.
            if begin < high <= begin + rows:
                low = max(low, begin)
                mask[low - begin : high - begin, low + behind : high + behind].tril_()

    def positions(self, begin: int, end: int) -> Any:
        result, gone = torch.arange(begin, end).repeat(3, 1), 0
        for start, part in self.parts:
            size = len(part.ids)
            saved = size - part.advance
            result[:, max(start + size - begin, 0) :] -= saved
            low, high = max(begin, start), min(end, start + size)
            if part.positions is not None and low < high:
                result[:, low - begin : high - begin] = (
                    start - gone + part.positions[:, low - start : high - start]
                )
            gone += saved
        return result


class MediaEncoder:
    """Encoder of media. `media_token_ids` and `perceive` are for any thread."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._manager: Any = None
        self._start_over: Callable[[], None] = self.forget
        self._model = model
        self._processor = processor
        self._decoder = MediaDecoder()
        self._kept: OwnerCache[EncodedMedia] = OwnerCache(KEPT_BYTES)
        self._processing = threading.Lock()
        self._computing = threading.Lock()
        self._here = threading.local()
        self._size = int(model.get_input_embeddings().num_embeddings)
        self._next = self._size
        self._three = False
        self.longest_block = 0
        """Largest number of ids that must be in one step."""
        self._room = _HIGHEST
        self._hooks = [
            model.get_input_embeddings().register_forward_pre_hook(self._keep_within),
            model.get_decoder().register_forward_pre_hook(self._lay_over, with_kwargs=True),
        ]
        self.modalities = frozenset(kind for kind in _kinds(processor) if self._takes(kind))
        if not self.modalities:
            self.close()

    def close(self) -> None:
        self._decoder.close()
        for hook in self._hooks:
            hook.remove()

    def serve(self, manager: Any, start_over: Callable[[], None], room: int) -> None:
        """Connect to a manager. `discard_cache` discards all pages; a step has at least `room` ids for a
        prompt.
        """
        self._manager, self._start_over, self._room = manager, start_over, room

    def media_token_ids(self, media: Media) -> list[int]:
        return self._known(media).ids

    def perceive(self, media: Media) -> EncodedMedia:
        """Return a medium, encoding it unless that is cached."""
        with self._computing:
            encoded_media = self._known(media)
            if encoded_media.embeds is None:
                self._encode(encoded_media)
                self._keep(media, encoded_media)
        return encoded_media

    def view(self, spans: Iterable[MediaSpan], is_over: Callable[[], bool]) -> PromptMediaView:
        """Return all media of a prompt, encoding them until `is_over`."""
        return PromptMediaView([(span.start, self.perceive(span.media)) for span in spans if not is_over()])

    @contextmanager
    def still(self) -> Iterator[None]:
        """Block encodings during the block."""
        with self._computing:
            yield

    def forget(self) -> None:
        """Discard everything encoded, because the weights have changed."""
        self._kept = OwnerCache(KEPT_BYTES)

    def _known(self, media: Media) -> EncodedMedia:
        encoded_media = self._kept.get("", media.digest)
        if encoded_media is None:
            try:
                encoded_media = self._process(media.kind, self._decode(media))
            except DragomanError:
                raise
            except Exception as error:
                _log.warning("The model's processor rejected a medium", exc_info=error)
                raise BadRequest(
                    "The model's processor rejected this image or audio.", code="invalid_value"
                ) from None
        self._keep(media, encoded_media)
        return encoded_media

    def _decode(self, media: Media) -> Any:
        if media.kind == "image":
            return self._decoder.decode_image(media).array
        return self._decoder.decode_audio(media, _rate(self._processor)).array

    def _keep(self, media: Media, encoded_media: EncodedMedia) -> None:
        self._kept.put("", media.digest, encoded_media, encoded_media.weight)

    def _process(self, kind: MediaKind, decoded: Any) -> EncodedMedia:
        fields: dict[str, Any] = {"text": [_token(self._processor, kind)], "add_special_tokens": False}
        fields |= (
            {"images": [decoded]}
            if kind == "image"
            else {"audio": [decoded], "sampling_rate": _rate(self._processor)}
        )
        # Its tokenizer is not thread-safe.
        with self._processing:
            mapping = dict(self._processor(**fields, return_tensors="pt"))
        return EncodedMedia(mapping["input_ids"][0].tolist(), mapping)

    def _encode(self, media: EncodedMedia) -> None:
        fields = self._reach(media.inputs)
        size, more = len(media.ids), set(fields) - _PLAIN
        if self._next + size > _HIGHEST:
            self._next = self._size
            self.forget()
            self._start_over()
        media.blocks = self._blocks(fields)
        media.first, self._next = self._next, self._next + size
        media.embeds = fields["inputs_embeds"][0]
        positions = fields.get("position_ids")
        if positions is not None and positions.ndim == 3:
            media.positions = positions[-3:, 0].cpu()
        if more:
            media.seen, media.deep = fields["visual_pos_masks"][0], fields["deepstack_visual_embeds"]
        media.inputs = {}

    def _blocks(self, fields: Mapping[str, Any]) -> list[tuple[int, int]]:
        masks = _masks(fields.get("attention_mask"))
        blocks = _find_blocks(masks[0]) if masks else []
        longest = max((high - low for low, high in blocks), default=0)
        if longest > self._room:
            message = (
                f"The image has {longest} ids that must be in one step, but a step has at most {self._room}."
            )
            raise BadRequest(
                f"{message[:-1]}; send a smaller one.", param=CONVERSATION, code="limit_exceeded"
            )
        self.longest_block = max(self.longest_block, longest)
        return blocks

    def _reach(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model up to its language model; return the inputs that this would get."""
        self._here.reaching = True
        try:
            with torch.no_grad():
                self._model(**{name: _moved(value, self._model) for name, value in inputs.items()})
        except _DecoderReached as reached:
            fields: dict[str, Any] = reached.args[0]
            return {
                name: value
                for name, value in fields.items()
                if name in _PLAIN or isinstance(value, torch.Tensor | list | tuple)
            }
        finally:
            self._here.reaching = False
        raise EngineFailed("The model has no inner language model that takes embeddings.")

    # Support is tested once, with small media.

    def _takes(self, kind: MediaKind) -> bool:
        try:
            check_installed(kind)
            rate = _rate(self._processor) if kind == "audio" else 0
            tried = np.zeros(rate, np.float32) if rate else np.zeros((_TRIED, _TRIED, 3), np.uint8)
            media = self._process(kind, tried)
            why = self._why_not(self._reach(media.inputs), media)
        except SettingsError as error:
            why = str(error)
        except Exception as error:
            why = f"{type(error).__name__} in its processor or its encoder"
            _log.debug("A test of the model's processor failed", exc_info=error)
        if why:
            _log.warning("Model takes no media of kind %s: %s", kind, why)
        return not why

    def _why_not(self, fields: Mapping[str, Any], media: EncodedMedia) -> str | None:
        if more := set(fields) - _PLAIN - _DEEP:
            return f"its language model also needs {min(more)}"
        if fields["inputs_embeds"].shape[:2] != (1, len(media.ids)):
            return "the numbers of its ids and embeddings differ"
        if (0, len(media.ids)) in self._blocks(fields):
            # As PaliGemma does: the text around an image is not known here.
            return "it attends to whole prompts in both directions, which batching does not support"
        positions = fields.get("position_ids")
        self._three = self._three or (positions is not None and positions.ndim == 3)
        return None

    # The steps of a batch.

    def _keep_within(self, _module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].clamp(max=self._size - 1), *args[1:])

    def _lay_over(self, _module: Any, args: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if getattr(self._here, "reaching", False):
            raise _DecoderReached(fields)
        if "write_index" not in fields:
            return None
        step = self._manager.batch_processor.inputs_and_outputs
        batch = [(one.state, one.query_length) for one in step.requests_in_batch]
        views = [state.logit_processor_kwargs["run"].view for state, _ in batch]
        if not any(views):
            return None
        rows = torch.tensor([0, *(count for _, count in batch)]).cumsum(0).tolist()
        embeds, deep = fields["inputs_embeds"], _DeepstackEmbeds(fields["inputs_embeds"])
        positions = fields["position_ids"]
        if self._three and positions.ndim == 2:
            positions = positions.unsqueeze(0).repeat(3, 1, 1)
        for index, ((state, count), view, (row, end)) in enumerate(
            zip(batch, views, pairwise(rows), strict=True)
        ):
            if view is None:
                continue
            begin = state.position_offset - count
            for mask, ends in _step_masks(fields):
                view.see_whole(mask[0, 0, row:end, : int(ends[index + 1])], begin)
            for at, part, which in view.within(begin, begin + count):
                size = which.stop - which.start
                embeds[0, row + at : row + at + size] = part.embeds[which].to(embeds)
                deep.add(row + at, part, which)
            if self._three:
                positions[:, 0, row:end] = view.positions(begin, begin + count).to(positions)
        return args, fields | {"inputs_embeds": embeds, "position_ids": positions} | deep.given()


def open_senses(folder: str, model: Any) -> MediaEncoder | None:
    """Create the encoder from the model's processor; None if the model takes only text here."""
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        _log.warning("Model takes only text: cannot load its processor: %s", safe_message(error))
        return None
    senses = MediaEncoder(model, processor)
    return senses if senses.modalities else None


class _DeepstackEmbeds:
    """Rows that are added after the first layers, at positions of a step."""

    def __init__(self, embeds: Any) -> None:
        self._mask = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        self._rows: list[Sequence[Any]] = []

    def add(self, row: int, part: EncodedMedia, which: slice) -> None:
        if part.deep:
            seen = part.seen[which]
            self._mask[0, row : row + len(seen)] = seen
            before = int(part.seen[: which.start].sum())
            self._rows.append([layer[before : before + int(seen.sum())] for layer in part.deep])

    def given(self) -> dict[str, Any]:
        if not self._rows:
            return {}
        layers = [torch.cat(layer) for layer in zip(*self._rows, strict=True)]
        return {"visual_pos_masks": self._mask, "deepstack_visual_embeds": layers}


def _kinds(processor: Any) -> Iterator[MediaKind]:
    if getattr(processor, "image_processor", None) is not None and _token(processor, "image"):
        yield "image"
    if getattr(processor, "feature_extractor", None) is not None and _token(processor, "audio"):
        yield "audio"


def _token(processor: Any, kind: MediaKind) -> str:
    return str(getattr(processor, f"{kind}_token", None) or "")


def _rate(processor: Any) -> int:
    return int(processor.feature_extractor.sampling_rate)


def _moved(value: Any, model: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


def _masks(mask: Any) -> list[Any]:
    every = mask.values() if isinstance(mask, dict) else [mask]
    return [each for each in every if isinstance(each, torch.Tensor) and each.ndim == 4]


def _step_masks(fields: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return each kind of mask of a step, and where the keys of each request end in it."""
    masks, ends = fields.get("attention_mask"), fields["cu_seq_lens_k"]
    if isinstance(masks, dict):
        return [(mask, ends[kind]) for kind, mask in masks.items()]
    return [] if masks is None else [(masks, next(iter(ends.values())))]


def _find_blocks(mask: Any) -> list[tuple[int, int]]:
    """Find the ranges of ids that attend to each other: `[(2, 6)]` if of eight ids the third to the sixth
    do.
    """
    allowed = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
    size = len(allowed)
    # The last id that each of them attends to.
    last = (size - 1 - allowed.flip(1).int().argmax(1)).tolist()
    blocks, at = [], 0
    while at < size:
        end = max(last[at], at) + 1
        if end > at + 1:
            blocks.append((at, end))
        at = end
    return blocks
