"""What a GGUF file holds, for `models` and `doctor`."""

from pathlib import Path
from typing import Any

LONGEST_LINE = 72
MANY = 12


def facts_of(path: Path) -> dict[str, Any]:
    """Opens the file, which checks that this build can run it."""
    from dragoman.engines.local.model import Model
    from dragoman.engines.local.tokenizer import LlamaTokenizer

    model = Model(path)
    tokenizer = LlamaTokenizer(model)
    details = model.details
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "name": model.name,
        "architecture": details["architecture"],
        "parameters": int(details["parameters"]),
        "quantization": quantization(details["description"]),
        "context": model.trained_context,
        "vocabulary": len(tokenizer.pieces),
        "templates": {name: first_line(text) for name, text in model.templates.items()},
        "special_tokens": list(tokenizer.special),
        "end_tokens": sorted(tokenizer.pieces[i].decode(errors="replace") for i in tokenizer.end_ids),
        "fills_gaps": tokenizer.infill is not None,
    }


def quantization(description: str) -> str:
    """`quantization("llama 1B Q4_K - Medium")` is `Q4_K - Medium`."""
    return "".join(description.split(maxsplit=2)[2:])


def first_line(text: str) -> str:
    """The first line of a template with anything on it, cut where a terminal would wrap."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "…"


def shown(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people: a name and a text each."""
    from dragoman.cli.banner import short
    from dragoman.cli.terminal import size

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
