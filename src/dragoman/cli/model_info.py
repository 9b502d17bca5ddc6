"""Model information: facts of a GGUF file, and the banner of `serve`."""

from pathlib import Path
from typing import Any

from dragoman._version import __version__
from dragoman.cli.terminal import size
from dragoman.engines.protocol import ModelCard
from dragoman.http.keys import is_for_this_machine, needs_key
from dragoman.logs import Colorizer
from dragoman.settings import Settings

# Facts for `models` and `doctor`.


LONGEST_LINE = 72
MANY = 12


def read_model_info(path: Path) -> dict[str, Any]:
    """Read a GGUF file, which also checks that this build can run it."""
    from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer

    model = LlamaModel(path)
    tokenizer = LlamaTokenizer(model)
    details = model.details
    return {
        "file": str(path),
        "bytes": sum(part.stat().st_size for part in model.parts),
        "name": model.name,
        "architecture": details["architecture"],
        "parameters": int(details["parameters"]),
        "quantization": quantization(details["description"]),
        "context": model.trained_context,
        "vocabulary": len(tokenizer.pieces),
        "templates": {name: first_line(text) for name, text in model.templates.items()},
        "special_tokens": list(tokenizer.special_ids),
        "end_tokens": sorted(tokenizer.pieces[i].decode(errors="replace") for i in tokenizer.end_ids),
        "fills_gaps": tokenizer.infill is not None,
    }


def quantization(description: str) -> str:
    """Cut a description: `quantization("llama 1B Q4_K - Medium")` is `Q4_K - Medium`."""
    return "".join(description.split(maxsplit=2)[2:])


def first_line(text: str) -> str:
    """Return the first line of a template that is not blank, cut to the width of a terminal."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "…"


def describe_facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Format the facts for people, as pairs of name and text."""
    templates = facts["templates"]
    rows = [
        ("file", facts["file"]),
        ("size", size(facts["bytes"])),
        ("name", facts["name"]),
        ("architecture", facts["architecture"]),
        ("parameters", short(facts["parameters"])),
        ("quantization", facts["quantization"]),
        ("context", f"{facts['context']} tokens"),
        ("vocabulary", f"{facts['vocabulary']} tokens"),
        ("end tokens", "  ".join(facts["end_tokens"])),
        ("special", _some(facts["special_tokens"])),
    ]
    rows += [
        ("template" if name == "default" else f"template {name}", line) for name, line in templates.items()
    ]
    return (
        rows
        if templates
        else [*rows, ("template", "none: /v1/completions works, chat needs --chat-template")]
    )


def _some(names: list[str]) -> str:
    rest = f"  and {len(names) - MANY} more" if len(names) > MANY else ""
    return "  ".join(names[:MANY]) + rest


# The banner: model, URLs, key, and two example requests.


# Details shown in one line, in this order; a bare number gets its unit.
SHOWN = {"architecture": "", "parameters": " parameters", "quantization": "", "bytes": "", "runner": ""}
COUNTED = {"slots": "slots", "threads": "threads"}


def banner(card: ModelCard, settings: Settings, url: str, paint: Colorizer, dialect: str = "plain") -> str:
    rows = [
        ("model", paint("bold", card.name) + _facts(card)),
        ("", _room(card)),
        *([("runner", card.details["why"])] if card.details.get("why") else []),
        ("dialect", dialect),
        ("api", paint("cyan", url if settings.uds else f"{url}/v1")),
        *([("ollama", _on_port(url, settings.ollama_port))] if settings.ollama_port else []),
        *([] if settings.uds else [("page", f"{url}/"), ("docs", f"{url}/docs")]),
        *([] if settings.metrics == "off" or settings.uds else [("metrics", f"{url}/metrics")]),
        ("key", _key(settings, paint)),
        *([("others", text) for text in suggest_models()] if _is_default(settings) else []),
    ]
    lines = [f"  {paint('dim', name.ljust(8))} {text}" for name, text in rows]
    head = f"{paint('bold', 'dragoman')} {__version__}"
    hello = [
        *_curl(card.name, settings, url),
        "",
        *([] if settings.uds else _python(card.name, settings, url)),
    ]
    body = [head, "", *lines, "", *(f"  {line}" if line else "" for line in hello), ""]
    return "\n".join(["", *body, paint("dim", "Ctrl-C to stop"), ""])


def announcement(url: str, model: str) -> str:
    """Return the line printed while the first model is loading and the port is already open."""
    return f"dragoman {__version__}: listening on {url}, loading {model}"


def list_of_models(names: list[str], settings: Settings, url: str, paint: Colorizer) -> str:
    """Format the banner of a server that loads its models on demand."""
    shown = ", ".join(names[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")
    rows = [
        ("models", f"{shown}; each is loaded on its first request"),
        ("api", paint("cyan", f"{url}/v1")),
        ("page", f"{url}/"),
        ("docs", f"{url}/docs"),
        ("key", _key(settings, paint)),
    ]
    lines = [f"  {paint('dim', name.ljust(8))} {text}" for name, text in rows]
    head = f"{paint('bold', 'dragoman')} {__version__}"
    return "\n".join(["", head, "", *lines, "", paint("dim", "Ctrl-C to stop"), ""])


SUGGESTED = (
    (5_000_000_000, "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M"),
    (2_500_000_000, "hf:Qwen/Qwen3-4B-GGUF:Q4_K_M"),
    (1_900_000_000, "hf:Qwen/Qwen3-1.7B-GGUF:Q8_0"),
    (700_000_000, "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0"),
)
"""Recommended models with the size of their weights."""
OFFERED = 3


def _is_default(settings: Settings) -> bool:
    return settings.model is None and settings.engine == "local"


def suggest_models() -> list[str]:
    """Suggest models if none was named: cached ones that fit, and a better one. Nothing is downloaded."""
    from dragoman.engines.local import hardware
    from dragoman.hub import ROOM
    from dragoman.hub.cache import list_cached

    room = int(ROOM * hardware.free_memory())
    try:
        here = [each for each in list_cached() if each.size <= room and each.path.is_file()]
    except OSError:
        here = []
    here.sort(key=lambda each: -each.size)
    names = [f"{each.name} ({size(each.size)})" for each in here[:OFFERED]]
    texts = [f"on this machine, ready to serve by name: {', '.join(names)}"] if names else []
    best = next((name for needed, name in SUGGESTED if needed <= room), None)
    if best and not any(str(each.name) == best for each in here):
        texts.append(f"small demo model; a better one that fits: dragoman serve {best} (downloads it)")
    return texts


def _on_port(url: str, port: int) -> str:
    return f"{url.rpartition(':')[0]}:{port}"


def _key(settings: Settings, paint: Colorizer) -> str:
    if needs_key(settings):
        return "required"
    if is_for_this_machine(settings):
        return "none (loopback only)"
    return paint("yellow", "none, and other machines may reach this address: set DRAGOMAN_API_KEY")


def _facts(card: ModelCard) -> str:
    details = {"quantization": quantization(card.details.get("description", "")), **card.details}
    facts = [fact(key, details[key]) + unit for key, unit in SHOWN.items() if details.get(key)]
    return "".join(f" · {text}" for text in facts)


def fact(key: str, value: str) -> str:
    """Format a detail: `fact("bytes", "92000000")` is `92 MB`; `fact("parameters", "134515008")` is
    `135M`.
    """
    if not value.isdecimal():
        return value
    if key == "bytes":
        return size(int(value))
    return short(int(value)) if key == "parameters" else value


def short(count: int) -> str:
    """Shorten a number: `short(134_515_008)` is `135M`."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return str(count)


def _room(card: ModelCard) -> str:
    counted = [f"{card.details[key]} {noun}" for key, noun in COUNTED.items() if card.details.get(key)]
    if card.details.get("kv_bytes", "").isdecimal():
        counted.append(f"up to {size(int(card.details['kv_bytes']))} of KV cache")
    adapters = [f"adapters {', '.join(card.adapters)}"] if card.adapters else []
    if card.details.get("draft"):
        counted.append(f"draft {card.details['draft']} ({size(int(card.details['draft_bytes']))})")
    if card.details.get("mmproj"):
        counted.append(f"projector {card.details['mmproj']} ({size(int(card.details['mmproj_bytes']))})")
    return " · ".join([f"context {card.max_model_len or 'as the engine has it'}", *counted, *adapters])


def _curl(model: str, settings: Settings, url: str) -> list[str]:
    key = [' -H "Authorization: Bearer $DRAGOMAN_API_KEY" \\'] if needs_key(settings) else []
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    name = f"--unix-socket {settings.uds} http://localhost{settings.root_path}" if settings.uds else url
    return [
        f"curl {name}/v1/chat/completions \\",
        *key,
        "  -H 'Content-Type: application/json' \\",
        f"  -d '{body}'",
    ]


def _python(model: str, settings: Settings, url: str) -> list[str]:
    key = 'os.environ["DRAGOMAN_API_KEY"]' if needs_key(settings) else '"none"'
    return [
        *(["import os"] if needs_key(settings) else []),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key={key})',
        'hello = [{"role": "user", "content": "Hello!"}]',
        f'answer = client.chat.completions.create(model="{model}", messages=hello)',
        "print(answer.choices[0].message.content)",
    ]
