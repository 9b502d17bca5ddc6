"""List the models of a running server, the cached weights, or the contents of a GGUF file."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from dragoman.cli.exits import CommandError
from dragoman.cli.parser import add_connection
from dragoman.cli.terminal import size, table
from dragoman.logs import Colorizer

SUMMARY = "list a server's models, or inspect a GGUF file"
EXAMPLE = """\
examples:
  dragoman models                              models served and weights cached on this machine
  dragoman models --url http://127.0.0.1:8000  models of a server
  dragoman models model.gguf                   contents of a file, or of the cached hf:org/repo:Q4_K_M
  dragoman models folder                       models in a folder
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="GGUF file, name of a cached model, or folder of models"
    )
    add_connection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.file is not None:
        path = _find(args.file)
        return _folder(path, args.json) if path.is_dir() else _file(path, args.json)
    if args.url is not None:
        return _server(args)
    return _here(args)


def _find(text: str) -> Path:
    """Find a file, folder or cached model. Nothing is downloaded."""
    from dragoman.hub import resolve_name
    from dragoman.hub.cache import find_cached

    name = resolve_name(text)
    if name is None:
        return Path(text).expanduser()
    model = find_cached(name)
    if model is None:
        hint = f"`dragoman show {name}` lists the hub's files, `dragoman pull {name}` downloads it."
        raise CommandError(f"{name} is not on this machine.", hint)
    return model.path


def _folder(path: Path, as_json: bool) -> int:
    from dragoman.hub.cache import list_folder

    folder = list_folder(path)
    if as_json:
        print_json([{"name": name, "path": str(target), "bytes": count} for name, target, count in folder])
    elif folder:
        rows = [(name, size(count), str(file_path.relative_to(path))) for name, file_path, count in folder]
        print(table(("model", "size", "where"), rows, Colorizer(sys.stdout)))
    else:
        print(f"No models in {path}: neither GGUF files nor folders of safetensors or for OpenVINO.")
    return 0


def _file(path: Path, as_json: bool) -> int:
    from dragoman.cli.model_info import describe_facts, read_model_info

    facts = read_model_info(path)
    if as_json:
        print_json(facts)
        return 0
    paint = Colorizer(sys.stdout)
    for name, text in describe_facts(facts):
        print(f"{paint('dim', name.ljust(12))}  {text}")
    return 0


def _server(args: argparse.Namespace) -> int:
    from dragoman.cli.address import key_of
    from dragoman.client import Client

    with Client(args.url, key_of(args.api_key)) as client:
        models = client.models()
    if args.json:
        print_json(models)
    else:
        print_models(models)
    return 0


def print_models(models: list[dict[str, Any]]) -> None:
    rows = [(m["id"], str(m.get("max_model_len") or "-"), _state(m)) for m in models]
    print(table(("model", "context", "state"), rows, Colorizer(sys.stdout)))


def _state(model: dict[str, Any]) -> str:
    """Format the state, such as `loading 40%`, or the owner for servers that report none."""
    status = model.get("status") or {}
    done = f" {status['progress']:.0%}" if status.get("progress") else ""
    return f"{status['value']}{done}" if "value" in status else str(model.get("owned_by") or "-")


def _here(args: argparse.Namespace) -> int:
    """Show the models of a dragoman on the default port, and the default weights."""
    url, models = running_models(None, args.api_key)
    cached = _list_cached()
    if args.json:
        print_json({"url": url, "models": models, "cached": cached})
        return 0
    paint = Colorizer(sys.stdout)
    if models:
        print(paint("dim", f"served at {url}"))
        print_models(models)
        print()
    print(paint("dim", "default weights"))
    where = f"{cached['file']}  {size(cached['bytes'])}" if cached["bytes"] else "not downloaded yet"
    print(where if cached["bytes"] else f"{where}; `dragoman serve` downloads them to {cached['file']}")
    return 0


def running_models(url: str | None, text: str | None) -> tuple[str, list[dict[str, Any]]]:
    """Return URL and models of the server at a URL, or of the one that the settings in this folder
    describe.
    """
    from dragoman.cli.address import key_of, own_models, own_url
    from dragoman.http.keys import keys_of
    from dragoman.settings import load

    settings = load()
    if url is not None:
        return url, own_models(url, key_of(text))
    url = own_url(settings)
    key = text or next(iter(keys_of(settings)), None)
    return url, own_models(url, key)


def _list_cached() -> dict[str, Any]:
    from dragoman.engines.default_weights import MEMBER, cache_folder, is_verified

    file = cache_folder() / Path(MEMBER).name
    there = file.stat().st_size if file.exists() else 0
    return {"file": str(file), "bytes": there, "verified": is_verified(file)}


def print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
