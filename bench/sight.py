"""What pictures cost: `python -m bench.sight`, or `--quick` for a first look.

The default model gets a projector with random weights and the shape of a small real one: it sees nothing, and
takes as long as one that does. Two things are measured. A second question about a picture, against one about
a text of as many tokens: nothing is encoded, so the first token should come as soon. And 32 streams with a
picture each beside a few that say something: these should never stand still for longer than it takes to
encode one picture, and the memory should be given back.
"""

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bench import machine
from bench.errors import BenchError, told
from bench.tables import OUT, Table, keep, ratio
from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.projector import DecodedMedia, EncodedChunk, Projector
from dragoman.media import Media, MediaSpan
from dragoman.media.decode import DecodedImage
from dragoman.types import Job, Sampling

SIDE, PATCH, WIDTH, HEADS, LAYERS, MODEL_WIDTH = 224, 14, 384, 6, 6, 576
TEXT = "The history of the city of Paris begins with the people who lived on the banks of the river. "


class Options(Struct, frozen=True):
    rounds: int = 15
    streams: int = 32
    speakers: int = 4
    tokens: int = 1700
    threads: int | None = None


QUICK = Options(rounds=3, streams=6, tokens=60)


class Figures(Struct):
    picture_ms: list[float]
    text_ms: list[float]
    encode_ms: float
    beside_ms: list[float]
    """The same of each picture while others speak: that is what these may have to wait for."""
    gaps_ms: list[float]
    """Between any two tokens of those who speak, while pictures came."""
    quiet_ms: list[float]
    """The same without pictures, beside as many prompts of text."""
    grown_mb: float
    kept_mb: float
    """Of that, pictures that are known from now on."""
    rates: list[float]
    """Tokens of prompts and pictures that were read in a second: beside pictures, and beside text."""


class RawDecoder:
    """Files here are nothing but pixels: what decoding takes is not measured."""

    def decode_image(self, media: Media) -> DecodedImage:
        return DecodedImage(media.width, media.height, media.data)

    def close(self) -> None: ...


def write_projector(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    numbers = {"image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "block_count": LAYERS}
    numbers |= {
        "feed_forward_length": 4 * WIDTH,
        "projection_dim": MODEL_WIDTH,
        "attention.head_count": HEADS,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
    chance = np.random.default_rng(1)
    for name, shape in shapes().items():
        writer.add_tensor(name, chance.normal(0, 0.05, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes() -> dict[str, tuple[int, ...]]:
    fields: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.position_embd.weight": ((SIDE // PATCH) ** 2, WIDTH),
        "mm.0.weight": (MODEL_WIDTH, WIDTH),
        "mm.0.bias": (MODEL_WIDTH,),
        "mm.2.weight": (MODEL_WIDTH, MODEL_WIDTH),
        "mm.2.bias": (MODEL_WIDTH,),
    }
    sizes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (WIDTH, WIDTH))
    sizes |= {"ffn_up": (4 * WIDTH, WIDTH), "ffn_down": (WIDTH, 4 * WIDTH)}
    for layer in range(LAYERS):
        for name, shape in sizes.items():
            fields[f"v.blk.{layer}.{name}.weight"], fields[f"v.blk.{layer}.{name}.bias"] = shape, shape[:1]
        for name in ("ln1", "ln2"):
            fields |= {f"v.blk.{layer}.{name}.{end}": (WIDTH,) for end in ("weight", "bias")}
    return fields


def picture(seed: int) -> Media:
    data = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8).tobytes()
    digest = sha256(data).hexdigest()
    return Media(kind="image", format="raw", data=data, digest=digest, width=SIDE, height=SIDE)


def ask(engine: LocalEngine, shown: Media | None, question: str, tokens: int, salt: str = "") -> Job:
    """About a picture, or about a text of as many tokens."""
    rows = list(engine.media_token_ids(picture(0) if shown is None else shown))
    if shown is None:
        rows = (engine.tokenizer.encode(TEXT) * len(rows))[: len(rows)]
    prompt = (*rows, *engine.tokenizer.encode(question))
    media = () if shown is None else (MediaSpan(shown, 0, len(rows)),)
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Job(id="bench", prompt=prompt, media=media, sampling=sampling, cache_salt=salt)


async def first_token(engine: LocalEngine, job: Job) -> float:
    began = time.perf_counter()
    async for step in engine.generate(job):
        if step.ids:
            return 1000 * (time.perf_counter() - began)
    raise BenchError("an answer had no token")


async def second_questions(engine: LocalEngine, options: Options) -> tuple[list[float], list[float]]:
    mapping: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.rounds):
        for sees in (True, False):
            shown, salt = (picture(number) if sees else None), f"second {number}"
            await first_token(engine, ask(engine, shown, "What is it?", 1, salt))
            mapping[sees].append(await first_token(engine, ask(engine, shown, "How large is it?", 1, salt)))
    return mapping[True], mapping[False]


async def gaps(engine: LocalEngine, job: Job, begun: asyncio.Event, over: asyncio.Event) -> list[float]:
    """Between two tokens of one who speaks, from its first one until the others are through."""
    values: list[float] = []
    last = 0.0
    async for step in engine.generate(job):
        now = time.perf_counter()
        if last and step.ids:
            values.append(1000 * (now - last))
        last = now
        begun.set()
        if over.is_set():
            break
    return values


async def beside(
    engine: LocalEngine, options: Options, sees: bool, first: int = 1000
) -> tuple[list[float], float]:
    """The pauses of those who speak, and how many tokens of the others were read in a second."""
    over, begun = asyncio.Event(), [asyncio.Event() for _ in range(options.speakers)]
    jobs = (
        ask(engine, None, "b" * n, options.tokens, f"speaker {n} {sees} {first}") for n in range(len(begun))
    )
    speaking = [
        asyncio.create_task(gaps(engine, job, event, over)) for job, event in zip(jobs, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    asked = [
        ask(engine, picture(first + number) if sees else None, "Why?", 4, f"beside {first + number}")
        for number in range(options.streams)
    ]
    began = time.perf_counter()
    await asyncio.gather(*(first_token(engine, job) for job in asked))
    rate = sum(len(job.prompt) for job in asked) / (time.perf_counter() - began)
    over.set()
    return [gap for values in await asyncio.gather(*speaking) for gap in values], rate


def encode_ms(engine: LocalEngine) -> float:
    assert engine._pictures is not None
    shown = engine._pictures._decode(picture(1))
    took = []
    for _ in range(5):
        began = time.perf_counter()
        engine._pictures.projector.encode(shown)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


class TimedProjector:
    """A projector that notes how long each encoding took."""

    def __init__(self, projector: Projector) -> None:
        self._encode = projector.encode
        self.took_ms: list[float] = []
        projector.encode = self.encode  # type: ignore[method-assign]

    def encode(self, decoded: DecodedMedia) -> list[EncodedChunk]:
        began = time.perf_counter()
        chunks = self._encode(decoded)
        self.took_ms.append(1000 * (time.perf_counter() - began))
        return chunks


def resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measure(options: Options) -> Figures:
    OUT.mkdir(exist_ok=True)
    path = write_projector(OUT / "mmproj-sight.gguf")
    slots = options.speakers + 4
    chosen = LocalOptions(
        runner="llamacpp", slots=slots, context=2048, mmproj=str(path), threads=options.threads
    )
    engine = LocalEngine.open(default_model(), chosen)
    assert engine._pictures is not None
    engine._pictures._decoder = RawDecoder()  # type: ignore[assignment]
    await engine.start()
    try:
        took = encode_ms(engine)
        seen, read = await second_questions(engine, options)
        quiet, usual = await beside(engine, options, sees=False)
        await beside(engine, replace(options, streams=4), sees=True)
        before, timed = resident_mb(), TimedProjector(engine._pictures.projector)
        # Other pictures than before, which would be known by now.
        paused, rate = await beside(engine, options, sees=True, first=2000)
        grown = resident_mb() - before
        kept = sum(each.size for each in engine._pictures._pictures.values()) / 1e6
        return Figures(seen, read, took, timed.took_ms, paused, quiet, grown, kept, [rate, usual])
    finally:
        await engine.stop()


def tables(figures: Figures, options: Options) -> list[Table]:
    seen, read = statistics.median(figures.picture_ms), statistics.median(figures.text_ms)
    first = [
        ["a picture, second question", f"{seen:.1f}", ratio(seen, read)],
        ["a text of as many tokens, second question", f"{read:.1f}", "1.00x"],
    ]
    pauses = f"pauses of {options.speakers} answers, {options.streams} pictures beside them"
    second = [
        ["one picture is encoded, alone", f"{figures.encode_ms:.1f}", ""],
        ["one picture is encoded, beside answers", *spread(figures.beside_ms)],
        [pauses, *spread(figures.gaps_ms)],
        ["the same beside prompts of text", *spread(figures.quiet_ms)],
        ["memory after, MB more than before", f"{figures.grown_mb:.1f}", f"{figures.kept_mb:.1f} are kept"],
    ]
    rates = "Tokens of prompts read in a second: {:.0f} with pictures, {:.0f} of text.".format(*figures.rates)
    return [
        Table("First token, ms", ["asked about", "median", "against text"], first, [machine.describe()]),
        Table("Others while pictures come, ms", ["what", "median, p99, p99.9", "longest"], second, [rates]),
    ]


def spread(values: list[float]) -> tuple[str, str]:
    """Machines have moments, so the longest of them says little by itself."""
    ordered = sorted(values)
    parts = (ordered[int(part * (len(ordered) - 1))] for part in (0.5, 0.99, 0.999))
    return ", ".join(f"{part:.1f}" for part in parts), f"{ordered[-1]:.1f}"


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a first look")
    parser.add_argument("--threads", type=int, help="of the engine; by default one for each core")
    args = parser.parse_args()
    options = replace(QUICK if args.quick else Options(), threads=args.threads)
    figures = asyncio.run(measure(options))
    keep("sight", figures, tables(figures, options))


if __name__ == "__main__":
    sys.exit(told(cli))
