"""Images and audio for vLLM, processed by vLLM's own input processor.

Each medium is processed once, separately, and cached; a request gets the result with its position in the
prompt. vLLM identifies it by its digest: in its cache of encoder outputs, and in prefixes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

from msgspec import Struct

from dragoman.engines.vllm.outputs import logger, telling_errors
from dragoman.errors import CONVERSATION, BadRequest, EngineFailed, SettingsError
from dragoman.media import Media, MediaKind, MediaSpan
from dragoman.media.decode import MediaDecoder, check_installed
from dragoman.owner_cache import OwnerCache

KEPT_BYTES = 256 * 1024 * 1024
"""Maximum bytes of processed media in the cache."""
RATE = 16_000
"""Sample rate at which audio is given to vLLM, which resamples it if a model needs another."""
_KINDS: tuple[MediaKind, ...] = ("image", "audio")
T = TypeVar("T")


class ProcessedMedia(Struct):
    """vLLM's result for a medium that was processed separately."""

    ids: list[int]
    kind: MediaKind
    item: Any
    hash: str
    where: Any
    """vLLM's `PlaceholderRange`: which of the ids have embeddings."""

    @property
    def weight(self) -> int:
        tensors = (getattr(element, "data", None) for element in self.item.values())
        return 8 * len(self.ids) + sum(int(getattr(each, "nbytes", 0)) for each in tensors)


class VllmMediaProcessor:
    """Processor of media. For any thread."""

    def __init__(self, llm: Any) -> None:
        self._renderer = llm.renderer
        self._processor = llm.renderer.get_mm_processor()
        self._most: Mapping[str, int] = self._processor.info.allowed_mm_limits
        self._kept: OwnerCache[ProcessedMedia] = OwnerCache(KEPT_BYTES)
        self._decoder = MediaDecoder()
        self._lock = Lock()
        self.modalities = frozenset(kind for kind in _KINDS if self._most.get(kind) and _is_installed(kind))

    def close(self) -> None:
        self._decoder.close()

    def known(self, spans: Iterable[MediaSpan]) -> bool:
        """Whether all media are cached, so that `prompt` is fast."""
        return all(self._kept.get("", span.media.digest) is not None for span in spans)

    def process(self, media: Media) -> ProcessedMedia:
        processed_media = self._kept.get("", media.digest)
        if processed_media is None:
            result = self._decode(media)
            with self._lock, telling_errors():
                processed_media = self._in_turn(lambda: self._process(media, result))
        self._kept.put("", media.digest, processed_media, processed_media.weight)
        return processed_media

    def prompt(self, ids: Sequence[int], spans: Iterable[MediaSpan], salt: str) -> Any:
        """Convert ids and media to vLLM's form of a prompt."""
        items: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        positions: dict[str, list[Any]] = {}
        for span in spans:
            media = self.process(span.media)
            items.setdefault(media.kind, []).append(media.item)
            hashes.setdefault(media.kind, []).append(media.hash)
            where = media.where
            moved = type(where)(offset=span.start, length=where.length, is_embed=where.is_embed)
            positions.setdefault(media.kind, []).append(moved)
        self._check_counts(Counter({kind: len(each) for kind, each in items.items()}))
        fields: dict[str, Any] = {"type": "multimodal", "prompt_token_ids": list(ids)}
        fields |= {"mm_kwargs": items, "mm_hashes": hashes, "mm_placeholders": positions}
        return fields | {"cache_salt": salt} if salt else fields

    def _check_counts(self, counts: Counter[str]) -> None:
        for kind, count in counts.items():
            if count > self._most[kind]:
                message = (
                    f"A request may have at most {self._most[kind]} media of kind {kind} (a limit of vLLM)."
                )
                raise BadRequest(message, param=CONVERSATION, code="invalid_value")

    def _decode(self, media: Media) -> Any:
        if media.kind == "audio":
            return self._decoder.decode_audio(media, RATE).array, RATE
        from PIL import Image

        return Image.fromarray(self._decoder.decode_image(media).array)

    def _process(self, media: Media, result: Any) -> ProcessedMedia:
        # The text of a prompt that vLLM creates for its own measurements.
        text = self._processor.dummy_inputs.get_dummy_text({media.kind: 1})
        prompt = {
            "prompt_token_ids": self._renderer.tokenizer.encode(text, add_special_tokens=False),
            "multi_modal_data": {media.kind: [result]},
            "multi_modal_uuids": {media.kind: [media.digest]},
        }
        # Without the cache whose other half is in vLLM's core: nothing is sent there yet.
        outcome = self._renderer.process_for_engine(prompt, time.time(), skip_mm_cache=True)
        (where,), (item,) = outcome["mm_placeholders"][media.kind], outcome["mm_kwargs"][media.kind]
        if item is None:
            raise EngineFailed("vLLM returned no data for this image or audio.")
        ids = [int(id_) for id_ in outcome["prompt_token_ids"][where.offset : where.offset + where.length]]
        return ProcessedMedia(ids, media.kind, item, outcome["mm_hashes"][media.kind][0], where)

    def _in_turn(self, work: Callable[[], T]) -> T:
        """Run work on vLLM's one thread for this; its libraries are not thread-safe."""
        pool = getattr(self._renderer, "_mm_executor", None)
        type_var_type: T = work() if pool is None else pool.submit(work).result()
        return type_var_type


def open_senses(llm: Any) -> VllmMediaProcessor | None:
    """Create the processor; None for a text-only model, or a version of vLLM with another interface."""
    if not llm.model_config.is_multimodal_model:
        return None
    try:
        senses = VllmMediaProcessor(llm)
    except Exception as error:
        logger.warning("Model takes only text: cannot use vLLM's media processor", exc_info=error)
        return None
    return senses if senses.modalities else None


def _is_installed(kind: MediaKind) -> bool:
    try:
        check_installed(kind)
    except SettingsError as error:
        logger.warning("Model takes no media of kind %s: %s", kind, error)
        return False
    return True
