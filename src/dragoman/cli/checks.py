"""The checks of `doctor`, one function each: what was found, and a remedy where something is wrong.

A check returns Findings. A DragomanError that it raises becomes a failure with the error's message.
"""

import asyncio
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.cli.terminal import size
from dragoman.settings import Settings

if TYPE_CHECKING:
    from dragoman.engines.local import LocalEngine
    from dragoman.engines.local.hardware import Gpu
    from dragoman.engines.protocol import Engine

Verdict: TypeAlias = Literal["ok", "warning", "failed"]


class Finding(Struct, frozen=True):
    name: str
    verdict: Verdict
    text: str
    advice: str = ""


PACKAGES = (
    "dragoman",
    "xllamacpp",
    "msgspec",
    "jinja2",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "numpy",
)
OPTIONAL = frozenset({"uvloop"})
CPU_FLAGS = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimd",
    "sve",
)
ENOUGH_MEMORY = 1 << 30
GREEDY_TOKENS = 8


class CheckContext(Struct):
    """The input of the checks; the model check leaves its engine here for the checks after it."""

    settings: Settings
    full: bool = False
    engine: "Engine | None" = None


Check: TypeAlias = Callable[[CheckContext], Iterator[Finding]]


def python(_: CheckContext) -> Iterator[Finding]:
    text = f"Python {platform.python_version()} at {sys.executable}"
    fine = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if fine else "failed", text, "" if fine else "Use Python 3.11 or newer.")


def packages(_: CheckContext) -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    texts: list[str] = []
    for name in PACKAGES:
        try:
            texts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            verdict: Verdict = "warning" if name in OPTIONAL else "failed"
            yield Finding("packages", verdict, f"{name} is missing", f"pip install {name}")
    yield Finding("packages", "ok", ", ".join(texts))


def binding(_: CheckContext) -> Iterator[Finding]:
    from dragoman.engines.local import binding

    binding.load()
    yield Finding(
        "binding",
        "ok",
        f"llama.cpp of xllamacpp {binding.PINNED} loads, and its structs match their declarations",
    )


def runner(patient: CheckContext) -> Iterator[Finding]:
    from dragoman.engines.local.opening import check_machine
    from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported
    from dragoman.engines.local.options import LocalOptions
    from dragoman.errors import SettingsError

    if patient.settings.engine != "local" or patient.settings.runner == "llamacpp":
        return
    try:
        check_machine(LocalOptions(runner=patient.settings.runner, kv_cache=patient.settings.kv_cache))
    except (OpenVinoUnsupported, SettingsError) as why:
        verdict: Verdict = "ok" if patient.settings.runner == "auto" else "failed"
        yield Finding("runner", verdict, f"llama.cpp; not OpenVINO, because {why}")
    else:
        known = patient.settings.runner == "openvino"
        which = (
            "OpenVINO" if known else "OpenVINO or llama.cpp, by a benchmark of each file that both support"
        )
        yield Finding("runner", "ok", which)


def processor(_: CheckContext) -> Iterator[Finding]:
    from dragoman.engines.local import hardware

    flags = hardware.cpu_flags()
    known = [flag for flag in CPU_FLAGS if flag in flags]
    cores = f"{hardware.cores()} of {os.cpu_count()} cores"
    text = f"{platform.machine()}, {cores}; {' '.join(known) or 'no vector units detected'}"
    slow = platform.machine() in ("x86_64", "AMD64") and bool(flags) and "avx2" not in flags
    advice = "Without AVX2 the bundled llama.cpp may not run here." if slow else ""
    yield Finding("processor", "warning" if slow else "ok", text, advice)


def gpu(patient: CheckContext) -> Iterator[Finding]:
    """Report the GPUs, whether the installed llama.cpp can use them, and what to install if it cannot."""
    from dragoman.engines.local import binding, hardware

    if patient.settings.engine != "local":
        return
    used, there = binding.load().gpus(), hardware.find_gpus()
    for device in used:
        text = f"llama.cpp computes on {device.description} ({device.name}, {size(device.bytes)})"
        value = " unless --gpu-layers 0" if patient.settings.gpu_layers != 0 else ", but --gpu-layers is 0"
        yield Finding("gpu", "ok", text + value)
    if there and not used:
        names = ", ".join(dict.fromkeys(result.name for result in there))
        yield Finding("gpu", "warning", f"{names}: the installed llama.cpp cannot use it", _to_use(there[0]))
    if not there and not used:
        yield Finding("gpu", "ok", "none found; the CPU computes")


WHEELS = "https://xorbitsai.github.io/xllamacpp/whl"
"""The index of xllamacpp's wheels for GPUs."""


def _to_use(result: "Gpu") -> str:
    """Return the command that installs the wheel of the pinned build for a GPU and its driver."""
    from dragoman.engines.local.binding import PINNED

    if result.kind == "metal":
        return (
            f"The default wheel supports Metal: pip install --force-reinstall --no-deps xllamacpp=={PINNED}"
        )
    fitting = [wheel for least, wheel in GPU_WHEELS.get(result.kind, ()) if least <= result.version]
    index = f"{WHEELS}/{fitting[0] if fitting else 'vulkan'}"
    return f"pip install --force-reinstall --no-deps xllamacpp=={PINNED} --index-url {index}"


GPU_WHEELS: dict[str, tuple[tuple[tuple[int, ...], str], ...]] = {
    "cuda": (((13, 2), "cu132"), ((12, 8), "cu128")),
    "rocm": (((7,), "rocm-7.2.4"), ((6, 4), "rocm-6.4.1")),
}
"""The wheel for each minimum driver version, newest first; older drivers use Vulkan."""


def memory(_: CheckContext) -> Iterator[Finding]:
    from dragoman.engines.local import hardware

    free = hardware.free_memory()
    fine = free >= ENOUGH_MEMORY
    advice = "" if fine else "Free some memory, or use a smaller model, --slots 1 and a short --context."
    yield Finding("memory", "ok" if fine else "warning", f"{size(free)} free for a model", advice)


def cache(_: CheckContext) -> Iterator[Finding]:
    from dragoman.engines.default_weights import cache_folder

    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    fine = there.is_dir() and os.access(there, os.W_OK)
    advice = "" if fine else "Set DRAGOMAN_CACHE to a writable folder."
    yield Finding(
        "cache", "ok" if fine else "failed", f"{folder} {'can' if fine else 'cannot'} be written", advice
    )


def data(patient: CheckContext) -> Iterator[Finding]:
    """Check the folder of the store. A missing folder is not created: its nearest existing parent is
    checked.
    """
    from dragoman.store import folder_of, make_folder

    folder = folder_of(patient.settings)
    if patient.settings.store in ("memory", "none"):
        yield Finding("data", "ok", "nothing is stored on disk")
        return
    there = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
    make_folder(there if there.is_dir() else folder)
    yield Finding("data", "ok", f"{folder} is writable")


def weights(patient: CheckContext) -> Iterator[Finding]:
    from dragoman.engines.default_weights import MEMBER, SHA256, SIZE, cache_folder, is_verified

    if patient.settings.model is not None or patient.settings.engine != "local":
        return
    file = cache_folder() / Path(MEMBER).name
    if not file.exists():
        advice = "`dragoman serve` downloads them on its first run."
        yield Finding("weights", "warning", "the default weights are not downloaded yet", advice)
    elif (patient.full and digest(file) != SHA256) or file.stat().st_size != SIZE:
        yield Finding(
            "weights", "failed", f"{file} is damaged", f"Delete {file}; the next start downloads it again."
        )
    else:
        how = "checksum correct" if patient.full else "verified" if is_verified(file) else "size correct"
        yield Finding("weights", "ok", f"{file}, {size(SIZE)}, {how}")


def digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def model(patient: CheckContext) -> Iterator[Finding]:
    """Load the model that `serve` would load. Nothing is downloaded, because a check should take seconds."""
    from dragoman.cli.builtin_engines import is_safetensors, local

    settings = patient.settings
    file = _find_model(settings)
    if file is None:
        text, advice = f"{settings.model} is not on this machine yet", f"`dragoman pull {settings.model}`"
        yield Finding("model", "warning", text, f"{advice} fetches it.")
        return
    if settings.engine != "local" or (settings.model is None and not file.exists()) or is_safetensors(file):
        return
    if settings.draft is not None and _find_model(replace(settings, model=settings.draft)) is None:
        yield Finding("model", "warning", f"the draft model {settings.draft} is not on this machine yet")
        settings = replace(settings, draft=None)
    begun = time.perf_counter()
    # Load by path, because loading the default model would download it again if it is damaged.
    patient.engine = engine = local(replace(settings, model=str(file)))
    took = time.perf_counter() - begun
    yield Finding(
        "model",
        "ok",
        f"{engine.card.name} loads in {took:.1f} s by {engine.card.details['runner']}; "
        f"context {engine.card.max_model_len or 'as the engine has it'}",
    )
    if why := engine.card.details.get("why"):
        yield Finding("runner", "ok", why)
    count, rate = asyncio.run(speak(engine))
    fine = count > 0
    advice = "" if fine else "The file may be damaged; try another one."
    yield Finding("speech", "ok" if fine else "failed", f"{count} tokens at {rate:.0f} tokens/s", advice)


def _find_model(settings: Settings) -> Path | None:
    """Return the path of the model, present or not; None if its name refers to a hub and it is not cached."""
    from dragoman.engines.default_weights import MEMBER, cache_folder
    from dragoman.hub import resolve_name
    from dragoman.hub.cache import find_cached

    if settings.model is None:
        return cache_folder() / Path(MEMBER).name
    name = resolve_name(settings.model) if settings.engine in ("local", "transformers", "vllm") else None
    if name is None:
        return Path(settings.model).expanduser()
    cached = find_cached(name)
    return None if cached is None else cached.path


async def speak(engine: "LocalEngine") -> tuple[int, float]:
    """Generate a few tokens greedily; return their number and the tokens per second after the first."""
    from dragoman.types import Job, Sampling

    ids = engine.tokenizer.encode("Once upon a time")
    sampling = Sampling(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    async for step in engine.generate(Job(id="doctor", prompt=tuple(ids), sampling=sampling)):
        if step.error is not None:
            raise step.error
        times.extend([time.perf_counter()] * len(step.ids))
    await engine.stop()
    spent = times[-1] - times[0] if times else 0.0
    return len(times), (len(times) - 1) / spent if spent else 0.0


def engine(patient: CheckContext) -> Iterator[Finding]:
    """Open any other engine as `serve` would, and test it."""
    from dragoman.cli.builtin_engines import is_safetensors
    from dragoman.cli.engine import engine_of
    from dragoman.cli.engine_checks import examine

    file = _find_model(patient.settings)
    if file is None or (patient.settings.engine == "local" and not is_safetensors(file)):
        return
    result = engine_of(patient.settings)
    yield Finding("engine", "ok", f"{patient.settings.engine} opens")
    findings = list(examine(result))
    yield from findings
    if all(finding.verdict == "ok" for finding in findings):
        patient.engine = result


def requests(patient: CheckContext) -> Iterator[Finding]:
    """Check the settings for requests and for parsing answers."""
    from dragoman.api.shared_fields import read_presets
    from dragoman.prompt.builtin_templates import check_template
    from dragoman.prompt.find import check_names

    settings = patient.settings
    check_names(settings)
    check_template(settings.chat_template)
    _, named = read_presets(settings)
    yield Finding("requests", "ok", f"presets for {', '.join(named)}" if named else "settings are valid")


def template(patient: CheckContext) -> Iterator[Finding]:
    from dragoman.prompt import PromptBuilder
    from dragoman.prompt.builtin_templates import choose_template
    from dragoman.types import Conversation, Message

    engine = patient.engine
    if engine is None:
        return
    chosen = choose_template(patient.settings.chat_template, engine.card, engine.tokenizer)
    prompter = PromptBuilder(engine.card, engine.tokenizer, template=chosen.source)
    ids = prompter.encode(Conversation(messages=(Message(role="user", content="Hello!"),)))
    text = f"{chosen.how} renders a greeting as {len(ids)} tokens"
    if chosen.guessed:
        yield Finding(
            "template", "warning", text, "A better template may help: --chat-template NAME or FILE."
        )
    else:
        yield Finding("template", "ok", text)


def port(patient: CheckContext) -> Iterator[Finding]:
    from dragoman.cli.exits import CommandError, hint_of
    from dragoman.cli.serve import check_port

    host, number = patient.settings.host.partition(",")[0].strip(), patient.settings.port
    if patient.settings.uds is not None:
        return
    try:
        check_port(host, number)
    except CommandError as error:
        yield Finding("port", "warning", error.message, hint_of(error))
    else:
        yield Finding("port", "ok", f"{number} on {host} is free" if number else "any free one")


CHECKS: tuple[Check, ...] = (
    python, packages, binding, processor, gpu, runner, memory, cache, data, weights, requests, model, engine,
    template, port,
)  # fmt: skip
