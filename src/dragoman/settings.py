"""Typed settings. A flag overrides the environment, which overrides the file."""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from dragoman.errors import SettingsError
from dragoman.limits import Limits
from dragoman.options import ENV_PREFIX, Option, options_of
from dragoman.pool_settings import PoolSettings

DEFAULT_FILE = "dragoman.toml"
SECRETS = frozenset({"api_key", "api_key_file", "admin_key", "admin_key_file", "upstream_key"})

Layer: TypeAlias = Mapping[str, Any]


class PresetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings for requests that use one name of the model."""

    sampling: dict[str, Any] = field(default_factory=dict)
    override: dict[str, Any] = field(default_factory=dict)


class Settings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[
        str | None,
        Meta(description="GGUF file, or a name such as hf:ORG/REPO; default: a small model, downloaded once"),
    ] = None
    model_name: Annotated[
        str | None, Meta(description="model name for clients; default: the model's own")
    ] = None
    model_alias: Annotated[list[str], Meta(description="further names of the model")] = field(
        default_factory=list
    )
    any_model: Annotated[
        bool,
        Meta(description="answer requests for unknown models with the served one; the reply names it"),
    ] = False
    engine: Annotated[
        str,
        Meta(
            description="engine: local, transformers, vllm, remote, rollout, one from another "
            "package, or an object as MODULE:OBJECT"
        ),
    ] = "local"
    engine_args: Annotated[
        dict[str, Any],
        Meta(description="engine-specific options as a JSON object; for vllm: its engine arguments"),
    ] = field(default_factory=dict)
    isolate_engine: Annotated[
        bool | None,
        Meta(
            description="run the engine in a subprocess, so that its crash does not end the server; "
            "default: for runner torch on a GPU"
        ),
    ] = None
    engine_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds without a heartbeat after which the engine is restarted; default: "
            "30 for the local engine and an isolated one, never for others"
        ),
    ] = None
    upstream: Annotated[
        list[str], Meta(description="URL of a server that runs the model, for the engine remote")
    ] = field(default_factory=list)
    upstream_key: Annotated[str | None, Meta(description="API key for the upstreams")] = None
    tokenizer: Annotated[
        str | None,
        Meta(description="folder or GGUF file with the model's tokenizer, for engines without one"),
    ] = None
    host: Annotated[str, Meta(description="addresses to listen on, separated by commas")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: a free one")] = 8000
    ollama_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="second port to listen on, for Ollama clients: 11434"),
    ] = None
    reuse_port: Annotated[
        bool, Meta(description="let other servers share the port; the system distributes connections")
    ] = False
    uds: Annotated[
        str | None, Meta(description="path of a unix socket to listen on, instead of host and port")
    ] = None
    uds_mode: Annotated[
        str, Meta(pattern="^0?[0-7]{3}$", description="permissions of the unix socket, as for chmod")
    ] = "600"
    tls_cert: Annotated[
        str | None,
        Meta(description="certificate chain as PEM; turns on HTTPS and turns off HTTP"),
    ] = None
    tls_key: Annotated[
        str | None, Meta(description="private key of the certificate, as PEM; default: in the same file")
    ] = None
    root_path: Annotated[
        str,
        Meta(
            pattern="^(/[A-Za-z0-9._~/-]*[A-Za-z0-9._~-])?$",
            description="path prefix that a proxy serves this server under: /llm",
        ),
    ] = ""
    forwarded_allow_ips: Annotated[
        list[str],
        Meta(
            description="proxies whose X-Forwarded-For, X-Forwarded-Proto and Forwarded headers are "
            "trusted: addresses or networks; * is any"
        ),
    ] = field(default_factory=list)
    api_key: Annotated[
        list[str],
        Meta(description="keys that clients may use; default: no key needed"),
    ] = field(default_factory=list)
    api_key_file: Annotated[
        str | None,
        Meta(description="file of further keys, one per line; `dragoman keys` edits it without a restart"),
    ] = None
    admin_key: Annotated[list[str], Meta(description="keys that may also load, unload and pull models")] = (
        field(default_factory=list)
    )
    admin_key_file: Annotated[str | None, Meta(description="file of further admin keys, one per line")] = None
    insecure: Annotated[
        bool, Meta(description="allow listening on a non-loopback address without an API key")
    ] = False
    metrics: Annotated[
        Literal["key", "open", "off"],
        Meta(description="access to /metrics: with a key, without one (open), or not at all (off)"),
    ] = "key"
    metrics_names: Annotated[
        Literal["dragoman", "vllm"],
        Meta(
            description="vllm: add the metric names that vLLM's dashboards and the inference "
            "extension of Kubernetes' Gateway API read"
        ),
    ] = "dragoman"
    allow_host: Annotated[
        list[str],
        Meta(description="further Host names accepted by a server on loopback; * is any"),
    ] = field(default_factory=list)
    allow_media_host: Annotated[
        list[str],
        Meta(
            description="hosts that files may be fetched from: HOST, HOST:PORT, HOST:* or *, with "
            "http:// before it to allow plain HTTP"
        ),
    ] = field(default_factory=list)
    cors_origin: Annotated[
        list[str],
        Meta(description="origins of web pages that may call the server: https://a.example; * is any"),
    ] = field(default_factory=list)
    chat_template: Annotated[
        str | None,
        Meta(
            description="chat template instead of the model's: a file, a name of one in the model or "
            "of a built-in one (chatml, llama3, gemma and others), or its text"
        ),
    ] = None
    dialect: Annotated[
        str,
        Meta(description="format of reasoning and tool calls; auto detects it from the chat template"),
    ] = "auto"
    tool_call_parser: Annotated[
        str | None, Meta(description="dialect of tool calls, by another server's name for it")
    ] = None
    reasoning_parser: Annotated[
        str | None, Meta(description="dialect of reasoning, if not that of tool calls")
    ] = None
    reasoning_open: Annotated[
        str | None,
        Meta(
            description="marker that opens reasoning, such as <think>, for unknown dialects; with "
            "reasoning_close"
        ),
    ] = None
    reasoning_close: Annotated[
        str | None, Meta(description="marker that closes reasoning, such as </think>; with reasoning_open")
    ] = None
    context: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(description="tokens per sequence; default: the model's, as memory allows"),
    ] = None
    slots: Annotated[Annotated[int, Meta(ge=1, le=256)] | None, Meta(description="concurrent sequences")] = (
        None
    )
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="CPU threads of the engine")
    ] = None
    runner: Annotated[
        Literal["auto", "llamacpp", "openvino", "torch"],
        Meta(
            description="backend of the local engine; auto picks the faster one by a benchmark on "
            "this machine"
        ),
    ] = "auto"
    readers: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        Meta(description="expected concurrent answers, for runner auto; default: slots, else 1"),
    ] = None
    kv_memory: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="MiB of KV cache of the local engine; default: 25% of free memory, at most 2048"),
    ] = None
    kv_cache: Annotated[
        Literal["auto", "int8", "bf16", "f16"],
        Meta(
            description="KV cache dtype of the local engine; int8 halves the memory, f16 is "
            "llama.cpp's default"
        ),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "int8", "fp8", "bf16"],
        Meta(description="dtype of weights with runner torch; int8 and fp8 halve the memory"),
    ] = "auto"
    draft: Annotated[
        str | None, Meta(description="smaller model of the same family, for speculative decoding")
    ] = None
    mmproj: Annotated[
        str | None,
        Meta(description="projector file of a vision or audio model; default: the one beside the model"),
    ] = None
    mmproj_auto: Annotated[bool, Meta(description="use a projector file found beside the model")] = True
    gpu_layers: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="layers that llama.cpp puts on a GPU; 0: none; default: all, if its build "
            "supports one"
        ),
    ] = None
    guesses: Annotated[
        Annotated[int, Meta(ge=0, le=32)] | None,
        Meta(description="draft tokens per step of the local engine; 0: none; default: 7 where faster"),
    ] = None
    deterministic: Annotated[
        bool,
        Meta(
            description="identical requests get identical answers, whatever else is computed; slower "
            "with llama.cpp, transformers and vLLM"
        ),
    ] = False
    sampling: Annotated[
        dict[str, Any],
        Meta(
            description="default request fields as a JSON object: temperature and all other "
            "samplers, max_tokens, stop, chat_template_kwargs; default: as the model's "
            "makers recommend"
        ),
    ] = field(default_factory=dict)
    override: Annotated[
        dict[str, Any],
        Meta(
            description="as sampling, but overrides the request; stop strings and bad words are "
            "added to the request's"
        ),
    ] = field(default_factory=dict)
    presets: Annotated[
        dict[str, PresetSettings],
        Meta(
            description="sampling and override by the model name, alias or adapter of the request: "
            '{"NAME": {"sampling": {...}, "override": {...}}}'
        ),
    ] = field(default_factory=dict)
    restore_reasoning: Annotated[
        Literal["off", "tools", "all"],
        Meta(
            description="default for requests: put back reasoning that the client dropped; off, all, "
            "or tools (only answers with tool calls since the last user message)"
        ),
    ] = "tools"
    unconstrained: Annotated[
        Literal["refuse", "check"],
        Meta(
            description="if the engine cannot constrain answers: refuse schemas and forced calls, or "
            "check each complete answer and retry if it does not fit"
        ),
    ] = "refuse"
    lora: Annotated[list[str], Meta(description="adapters as NAME=FILE; clients use NAME as the model")] = (
        field(default_factory=list)
    )
    lora_dir: Annotated[
        str | None,
        Meta(
            description="folder of adapters that clients may load and unload; default: adapters are "
            "fixed at start"
        ),
    ] = None
    mcp_config: Annotated[
        str | None, Meta(description="file of MCP servers whose tools the server may call")
    ] = None
    mcp_allow: Annotated[
        list[str],
        Meta(description="MCP server hosts that requests may name: HOST, HOST:PORT, HOST:* or *"),
    ] = field(default_factory=list)
    mcp_timeout: Annotated[float, Meta(gt=0, description="timeout of an MCP server's reply in seconds")] = (
        60.0
    )
    history: Annotated[
        Literal["template", "sampled"],
        Meta(
            description="default for requests: earlier answers in prompts as the template renders "
            "them, or as they were sampled"
        ),
    ] = "template"
    trajectories: Annotated[
        bool,
        Meta(description="store ids and log probabilities of every stored answer, for training"),
    ] = False
    unknown_fields: Annotated[
        Literal["error", "warn"],
        Meta(
            description="unknown request fields that are not likely typos: reject with 400 (error) "
            "or list in the header x-dragoman-ignored (warn)"
        ),
    ] = "warn"
    keep_alive: Annotated[
        float, Meta(gt=0, description="seconds without output after which a stream gets a comment")
    ] = 15.0
    write_interval: Annotated[
        float, Meta(ge=0, le=1, description="seconds that a stream's events may wait to share one write")
    ] = 0.0
    header_timeout: Annotated[
        float, Meta(gt=0, description="timeout for the headers of a request in seconds")
    ] = 10.0
    body_timeout: Annotated[float, Meta(gt=0, description="timeout for the body of a request in seconds")] = (
        30.0
    )
    write_timeout: Annotated[
        float, Meta(gt=0, description="seconds after which a client that reads nothing is disconnected")
    ] = 60.0
    idle_timeout: Annotated[float, Meta(gt=0, description="seconds that an idle connection stays open")] = (
        75.0
    )
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="default timeout of an answer in seconds; default: none"),
    ] = None
    shutdown_grace: Annotated[
        int, Meta(ge=0, description="seconds that running answers get to finish on shutdown")
    ] = 10
    store: Annotated[
        str,
        Meta(
            description="storage of responses and conversations: sqlite (a file in data_dir), "
            "memory, none, or a postgresql:// URL, which several servers may share"
        ),
    ] = "sqlite"
    data_dir: Annotated[
        str | None,
        Meta(description="folder of the database; default: dragoman in the user's data folder"),
    ] = None
    files_dir: Annotated[
        str | None,
        Meta(
            description="folder of uploaded files and batches, which several servers may share; "
            "default: files in data_dir, or a temporary one with store = memory or none"
        ),
    ] = None
    store_max_bytes: Annotated[
        int,
        Meta(
            ge=1024 * 1024,
            description="maximum bytes of the store; above it, the key with the most loses its "
            "oldest records",
        ),
    ] = 1024 * 1024 * 1024
    store_max_age: Annotated[int, Meta(ge=1, description="seconds after which stored records expire")] = (
        30 * 24 * 3600
    )
    otel: Annotated[
        bool,
        Meta(description="OpenTelemetry traces and metrics; the OTEL_* variables configure the exporters"),
    ] = False
    otel_endpoint: Annotated[
        str | None,
        Meta(description="OTLP/HTTP collector for them, as http://HOST:4318; turns otel on"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="minimum level of log lines")
    ] = "info"
    log_json: Annotated[bool, Meta(description="log lines as JSON objects")] = False
    limits: Limits = Limits()


def options() -> Iterator[Option]:
    """Yield every setting in the order of declaration, limits last."""
    yield from options_of(Settings, (), "")
    yield from options_of(Limits, ("limits",), "limit_")


def adapters_of(settings: Settings) -> dict[str, str]:
    """Parse the setting `lora`: `["poet=poet.gguf"]` gives `{"poet": "poet.gguf"}`."""
    adapters: dict[str, str] = {}
    for entry in settings.lora:
        name, _, file = entry.partition("=")
        if not name.strip() or not file.strip():
            raise SettingsError(f"`lora` takes NAME=FILE, not {entry}.")
        if name.strip() in adapters:
            raise SettingsError(f"`lora` has two adapters named {name.strip()}.")
        adapters[name.strip()] = file.strip()
    return adapters


def load(
    flags: Layer | None = None, *, environ: Mapping[str, str] | None = None, file: str | None = None
) -> Settings:
    """Load the settings of a process from the file, then the environment, then flags (by option name)."""
    environ = os.environ if environ is None else environ
    chosen = file or environ.get(ENV_PREFIX + "CONFIG")
    merged: dict[str, Any] = {}
    for source, layer in (
        (chosen or DEFAULT_FILE, _from_file(chosen)),
        ("the environment", _from_names(environ, by_env=True)),
        ("the command line", _from_names(flags or {}, by_env=False)),
    ):
        _merge(merged, layer)
        _check(merged, source)
    return _check(merged, "the settings")


def change_settings(settings: Settings, changes: Layer) -> Settings:
    """Return changed settings, checked like all others: `change_settings(settings, {"port": 9000})`."""
    return _check({**msgspec.structs.asdict(settings), **changes}, "the arguments") if changes else settings


def _from_file(chosen: str | None) -> dict[str, Any]:
    path = Path(chosen or DEFAULT_FILE)
    if chosen is None and not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"The settings file {path} is not valid TOML: {error}.") from error


def _from_names(values: Mapping[str, Any], *, by_env: bool) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for option in options():
        value = values.get(option.env if by_env else option.name)
        if by_env and option.name in SECRETS and value is not None and not value.strip(", "):
            # An empty variable was meant to set a key; without a key the server would be open to everyone.
            raise SettingsError(f"{option.env} is empty: give it a value, or unset it to have no key.")
        if value in (None, [], ""):
            continue
        if option.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if option.is_object and isinstance(value, str):
            value = _object(option, value)
        _merge(layer, _nest(option.path, value))
    return layer


def _object(option: Option, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise SettingsError(f"`{option.name}` takes a JSON object: {error}.") from error


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def _merge(into: dict[str, Any], layer: Layer) -> None:
    for name, value in layer.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _check(merged: Layer, source: str) -> Settings:
    try:
        return msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        name = f"`{path.rstrip('`')}`: " if path else ""
        raise SettingsError(f"A setting in {source} is wrong: {name}{what}.") from error
