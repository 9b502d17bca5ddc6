"""What a model that vLLM runs sees and hears: by vLLM's own processing of inputs.

Each picture is processed once, alone, and kept; a request gets what came of it, with the place where it
stands in the prompt. vLLM knows it by its digest: in its cache of encoders' outputs, and in prefixes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

from msgspec import Struct

from dragoman.engines.vllm.outputs import logger, telling_errors
from dragoman.errors import CONVERSATION, BadRequest, EngineFailed, SettingsError
from dragoman.lately import Lately
from dragoman.media import Media, MediaKind, MediaSpan
from dragoman.media.decode import MediaDecoder, check_installed

KEPT_BYTES = 256 * 1024 * 1024
"""Of what was made of pictures and sounds lately."""
RATE = 16_000
"""At which sounds are given to vLLM, which makes another of it where a model wants that."""
_KINDS: tuple[MediaKind, ...] = ("image", "audio")
T = TypeVar("T")


class Processed(Struct):
    """What vLLM made of a picture or a sound, where it stood alone."""

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


class VllmSenses:
    """For any thread."""

    def __init__(self, llm: Any) -> None:
        self._renderer = llm.renderer
        self._processor = llm.renderer.get_mm_processor()
        self._most: Mapping[str, int] = self._processor.info.allowed_mm_limits
        self._kept: Lately[Processed] = Lately(KEPT_BYTES)
        self._decoder = MediaDecoder()
        self._lock = Lock()
        self.modalities = frozenset(kind for kind in _KINDS if self._most.get(kind) and _is_installed(kind))

    def close(self) -> None:
        self._decoder.close()

    def known(self, spans: Iterable[MediaSpan]) -> bool:
        """Whether `prompt` has nothing left to do that takes time."""
        return all(self._kept.get("", span.media.digest) is not None for span in spans)

    def process(self, media: Media) -> Processed:
        found = self._kept.get("", media.digest)
        if found is None:
            given = self._decode(media)
            with self._lock, telling_errors():
                found = self._in_turn(lambda: self._process(media, given))
        self._kept.put("", media.digest, found, found.weight)
        return found

    def prompt(self, ids: Sequence[int], spans: Iterable[MediaSpan], salt: str) -> Any:
        """Ids and what stands among them, as vLLM takes it."""
        items: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        places: dict[str, list[Any]] = {}
        for span in spans:
            found = self.process(span.media)
            items.setdefault(found.kind, []).append(found.item)
            hashes.setdefault(found.kind, []).append(found.hash)
            where = found.where
            moved = type(where)(offset=span.start, length=where.length, is_embed=where.is_embed)
            places.setdefault(found.kind, []).append(moved)
        self._check_counts(Counter({kind: len(each) for kind, each in items.items()}))
        made: dict[str, Any] = {"type": "multimodal", "prompt_token_ids": list(ids)}
        made |= {"mm_kwargs": items, "mm_hashes": hashes, "mm_placeholders": places}
        return made | {"cache_salt": salt} if salt else made

    def _check_counts(self, counts: Counter[str]) -> None:
        for kind, count in counts.items():
            if count > self._most[kind]:
                message = f"At most {self._most[kind]} of kind {kind} may be in one request, as vLLM is set."
                raise BadRequest(message, param=CONVERSATION, code="invalid_value")

    def _decode(self, media: Media) -> Any:
        if media.kind == "audio":
            return self._decoder.decode_audio(media, RATE).array, RATE
        from PIL import Image

        return Image.fromarray(self._decoder.decode_image(media).array)

    def _process(self, media: Media, given: Any) -> Processed:
        # What stands in a prompt that vLLM makes up for its own measurements.
        text = self._processor.dummy_inputs.get_dummy_text({media.kind: 1})
        prompt = {
            "prompt_token_ids": self._renderer.tokenizer.encode(text, add_special_tokens=False),
            "multi_modal_data": {media.kind: [given]},
            "multi_modal_uuids": {media.kind: [media.digest]},
        }
        # Not through the cache whose other half is in vLLM's core: nothing is sent there yet.
        made = self._renderer.process_for_engine(prompt, time.time(), skip_mm_cache=True)
        (where,), (item,) = made["mm_placeholders"][media.kind], made["mm_kwargs"][media.kind]
        if item is None:
            raise EngineFailed("vLLM made nothing of what it was shown.")
        ids = [int(id_) for id_ in made["prompt_token_ids"][where.offset : where.offset + where.length]]
        return Processed(ids, media.kind, item, made["mm_hashes"][media.kind][0], where)

    def _in_turn(self, work: Callable[[], T]) -> T:
        """vLLM has one thread for this, and libraries that must not be in two."""
        pool = getattr(self._renderer, "_mm_executor", None)
        found: T = work() if pool is None else pool.submit(work).result()
        return found


def open_senses(llm: Any) -> VllmSenses | None:
    """None for a model that takes text only, and where this version of vLLM has another way to do it."""
    if not llm.model_config.is_multimodal_model:
        return None
    try:
        senses = VllmSenses(llm)
    except Exception as error:
        logger.warning("vLLM's model takes text only here", exc_info=error)
        return None
    return senses if senses.modalities else None


def _is_installed(kind: MediaKind) -> bool:
    try:
        check_installed(kind)
    except SettingsError as error:
        logger.warning("The model gets no media of kind %s here: %s", kind, error)
        return False
    return True
