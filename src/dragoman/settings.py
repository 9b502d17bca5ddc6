"""One typed settings object. A flag beats the environment, the environment beats the file."""

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
    """What holds for the requests that name the model in one of its ways."""

    sampling: dict[str, Any] = field(default_factory=dict)
    override: dict[str, Any] = field(default_factory=dict)


class Settings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[
        str | None,
        Meta(description="a GGUF file, or a name as hf:ORG/REPO; without one small weights are fetched once"),
    ] = None
    model_name: Annotated[str | None, Meta(description="the name clients see; default: the model's own")] = (
        None
    )
    model_alias: Annotated[list[str], Meta(description="further names for the model")] = field(
        default_factory=list
    )
    any_model: Annotated[
        bool,
        Meta(
            description="requests that name a model which is not there are answered by the one that is; the "
            "reply says which"
        ),
    ] = False
    engine: Annotated[
        str,
        Meta(
            description="what runs the model: local, transformers, vllm, remote, rollout, one that another "
            "package brings, or any object as MODULE:OBJECT"
        ),
    ] = "local"
    engine_args: Annotated[
        dict[str, Any],
        Meta(description="what only this engine knows, as a JSON object: for vllm, arguments of its engine"),
    ] = field(default_factory=dict)
    isolate_engine: Annotated[
        bool | None,
        Meta(
            description="run the engine in a process of its own: its crash is not the server's; default: for "
            "the runner torch on a GPU"
        ),
    ] = None
    engine_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds without a sign of life after which the engine is taken for stuck and opened "
            "again; default: 30 for the local engine and an isolated one, never for others"
        ),
    ] = None
    upstream: Annotated[
        list[str], Meta(description="for the engine remote: the address of a server that runs the model")
    ] = field(default_factory=list)
    upstream_key: Annotated[str | None, Meta(description="the key of the upstreams")] = None
    tokenizer: Annotated[
        str | None,
        Meta(description="the model's tokenizer, a folder or a GGUF file, for engines that do not bring one"),
    ] = None
    host: Annotated[str, Meta(description="address to listen on; several with commas between them")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8000
    ollama_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="a second port to listen on, where clients of Ollama look: 11434"),
    ] = None
    reuse_port: Annotated[
        bool, Meta(description="let other servers listen on the same port: the system shares connections out")
    ] = False
    uds: Annotated[
        str | None, Meta(description="listen on a unix socket at this path, instead of a host and a port")
    ] = None
    uds_mode: Annotated[
        str, Meta(pattern="^0?[0-7]{3}$", description="who may use the unix socket, as chmod takes it")
    ] = "600"
    tls_cert: Annotated[
        str | None,
        Meta(description="a certificate with its chain, as PEM: HTTPS is spoken, and nothing else"),
    ] = None
    tls_key: Annotated[
        str | None, Meta(description="the key of the certificate, as PEM; default: it is in the same file")
    ] = None
    root_path: Annotated[
        str,
        Meta(
            pattern="^(/[A-Za-z0-9._~/-]*[A-Za-z0-9._~-])?$", description="where a proxy has the server: /llm"
        ),
    ] = ""
    forwarded_allow_ips: Annotated[
        list[str],
        Meta(
            description="proxies whose X-Forwarded-For, X-Forwarded-Proto and Forwarded are believed: "
            "addresses or networks; * is any"
        ),
    ] = field(default_factory=list)
    api_key: Annotated[
        list[str],
        Meta(description="keys that clients may use; without one the server is open to its address"),
    ] = field(default_factory=list)
    api_key_file: Annotated[
        str | None,
        Meta(description="a file of further keys, one a line; `dragoman keys` changes it, without a restart"),
    ] = None
    admin_key: Annotated[
        list[str], Meta(description="keys that may also change what is served: load, unload and pull models")
    ] = field(default_factory=list)
    admin_key_file: Annotated[str | None, Meta(description="a file of further admin keys, one a line")] = None
    insecure: Annotated[
        bool, Meta(description="listen on an address that other machines reach, though there is no key")
    ] = False
    metrics: Annotated[
        Literal["key", "open", "off"],
        Meta(description="who may read /metrics: those with a key, everybody (open), or nobody (off)"),
    ] = "key"
    metrics_names: Annotated[
        Literal["dragoman", "vllm"],
        Meta(
            description="vllm: /metrics has the figures also by the names that vLLM's dashboards and the "
            "inference extension of Kubernetes' Gateway API read"
        ),
    ] = "dragoman"
    allow_host: Annotated[
        list[str],
        Meta(description="further names by which a server on the loopback may be called; * is any"),
    ] = field(default_factory=list)
    allow_media_host: Annotated[
        list[str],
        Meta(
            description="hosts from which files are fetched that requests name: HOST, HOST:PORT, "
            "HOST:* or *, with http:// before it if TLS is not needed"
        ),
    ] = field(default_factory=list)
    cors_origin: Annotated[
        list[str], Meta(description="web pages that may ask, by their origin: https://a.example; * is any")
    ] = field(default_factory=list)
    chat_template: Annotated[
        str | None,
        Meta(
            description="a chat template to use instead of the model's: a file, the name of one that the "
            "model has, that of a known one (chatml, llama3, gemma and others), or its text"
        ),
    ] = None
    dialect: Annotated[
        str,
        Meta(
            description="how the model writes reasoning and tool calls; auto finds it from the chat template"
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str | None, Meta(description="the dialect of tool calls, by the name that other servers have for it")
    ] = None
    reasoning_parser: Annotated[
        str | None, Meta(description="the dialect of reasoning, where it is another than that of tool calls")
    ] = None
    reasoning_open: Annotated[
        str | None,
        Meta(
            description="what opens reasoning, such as <think>, for models whose dialect is not known; with "
            "reasoning_close"
        ),
    ] = None
    reasoning_close: Annotated[
        str | None, Meta(description="what closes reasoning, such as </think>; with reasoning_open")
    ] = None
    context: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(description="tokens of one sequence; default: the model's, as memory allows"),
    ] = None
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None, Meta(description="sequences computed at the same time")
    ] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="threads of the engine")
    ] = None
    runner: Annotated[
        Literal["auto", "llamacpp", "openvino", "torch"],
        Meta(
            description="what computes in the engine local; auto is the one that is faster here, as measured"
        ),
    ] = "auto"
    readers: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        Meta(
            description="answers expected at a time, for which runner auto decides; default: slots, or else 1"
        ),
    ] = None
    kv_memory: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="MiB for keys and values in the engine local; default: a quarter of what is free, "
            "2048 at most"
        ),
    ] = None
    kv_cache: Annotated[
        Literal["auto", "int8", "bf16", "f16"],
        Meta(
            description="how the engine local keeps keys and values; int8 takes half the memory, f16 is what "
            "llama.cpp itself does"
        ),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "int8", "fp8", "bf16"],
        Meta(description="what the runner torch keeps weights in; int8 and fp8 take half the memory"),
    ] = "auto"
    draft: Annotated[str | None, Meta(description="a smaller model of its family, to guess ahead")] = None
    mmproj: Annotated[
        str | None,
        Meta(description="the projector of a model that sees or hears; default: the one beside its file"),
    ] = None
    mmproj_auto: Annotated[
        bool, Meta(description="whether a projector that lies beside a model's file is used with it")
    ] = True
    gpu_layers: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="layers that llama.cpp puts onto a GPU; 0: none; default: all, if its build has one"
        ),
    ] = None
    guesses: Annotated[
        Annotated[int, Meta(ge=0, le=32)] | None,
        Meta(
            description="tokens the engine local may guess ahead of a step; 0: none; default: 7 where it pays"
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Meta(
            description="the same question gets the same answer, whatever is computed beside it; costs speed "
            "with llama.cpp, transformers and vLLM"
        ),
    ] = False
    sampling: Annotated[
        dict[str, Any],
        Meta(
            description="what holds where a request does not say, as a JSON object with the fields of a "
            "request: temperature and all other samplers, max_tokens, stop, chat_template_kwargs; default: "
            "what the model's makers recommend"
        ),
    ] = field(default_factory=dict)
    override: Annotated[
        dict[str, Any],
        Meta(
            description="as sampling, but it holds whatever a request says; its stop strings and bad words "
            "hold beside those of the request"
        ),
    ] = field(default_factory=dict)
    presets: Annotated[
        dict[str, PresetSettings],
        Meta(
            description="sampling and override for requests that name the model so, by names of models, "
            'aliases and adapters: {"NAME": {"sampling": {...}, "override": {...}}}'
        ),
    ] = field(default_factory=dict)
    restore_reasoning: Annotated[
        Literal["off", "tools", "all"],
        Meta(
            description="where a request does not say: to which answers that come back without their "
            "reasoning it is given back; tools: to calls since the last user's message"
        ),
    ] = "tools"
    unconstrained: Annotated[
        Literal["refuse", "check"],
        Meta(
            description="with an engine that cannot constrain its answers: refuse schemas and forced calls, "
            "or check each answer as a whole, and have it written again where it does not fit"
        ),
    ] = "refuse"
    lora: Annotated[
        list[str], Meta(description="adapters as NAME=FILE; clients choose one by that name as the model")
    ] = field(default_factory=list)
    lora_dir: Annotated[
        str | None,
        Meta(
            description="a folder whose adapters clients may load, and unload, while the server runs; "
            "default: adapters stay as they were at the start"
        ),
    ] = None
    mcp_config: Annotated[
        str | None, Meta(description="a file of MCP servers whose tools the server may call")
    ] = None
    mcp_allow: Annotated[
        list[str],
        Meta(description="hosts of MCP servers that requests may name, as HOST, HOST:PORT, HOST:* or *"),
    ] = field(default_factory=list)
    mcp_timeout: Annotated[
        float, Meta(gt=0, description="seconds that an MCP server gets for one answer")
    ] = 60.0
    history: Annotated[
        Literal["template", "sampled"],
        Meta(
            description="where a request does not say: whether prompts have earlier answers as the template "
            "writes them now, or as they were sampled"
        ),
    ] = "template"
    trajectories: Annotated[
        bool,
        Meta(description="keep the ids and log probabilities of every stored answer, for training"),
    ] = False
    unknown_fields: Annotated[
        Literal["error", "warn"],
        Meta(
            description="what becomes of a field that nobody knows and that is no slip: a 400, or a name in "
            "the header x-dragoman-ignored"
        ),
    ] = "warn"
    keep_alive: Annotated[
        float, Meta(gt=0, description="seconds of silence on a stream after which a comment is sent")
    ] = 15.0
    write_interval: Annotated[
        float, Meta(ge=0, le=1, description="seconds that a stream's events wait to leave in one write")
    ] = 0.0
    header_timeout: Annotated[
        float, Meta(gt=0, description="seconds in which the head of a request must be there")
    ] = 10.0
    body_timeout: Annotated[
        float, Meta(gt=0, description="seconds in which the body of a request must be there")
    ] = 30.0
    write_timeout: Annotated[
        float, Meta(gt=0, description="seconds after which a client that takes nothing is cut off")
    ] = 60.0
    idle_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a connection is kept between two requests")
    ] = 75.0
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds that an answer may take where the request has no timeout; default: any time"
        ),
    ] = None
    shutdown_grace: Annotated[
        int, Meta(ge=0, description="seconds that running answers get to finish when the server stops")
    ] = 10
    store: Annotated[
        str,
        Meta(
            description="where responses and conversations are kept: sqlite (a file in data_dir), memory, "
            "none, or the postgresql:// address of a database, which several servers may share"
        ),
    ] = "sqlite"
    data_dir: Annotated[
        str | None,
        Meta(description="the folder of the database; default: dragoman in the user's folder for data"),
    ] = None
    files_dir: Annotated[
        str | None,
        Meta(
            description="the folder of uploaded files and of batches, which several servers may share; "
            "default: files in data_dir, or with store = memory or none one that goes with the process"
        ),
    ] = None
    store_max_bytes: Annotated[
        int,
        Meta(
            ge=1024 * 1024,
            description="bytes the store may take; above, the oldest of the key with the most goes",
        ),
    ] = 1024 * 1024 * 1024
    store_max_age: Annotated[int, Meta(ge=1, description="seconds after which what is stored is dropped")] = (
        30 * 24 * 3600
    )
    otel: Annotated[
        bool,
        Meta(description="traces and metrics by OpenTelemetry; the OTEL_* variables say where they go"),
    ] = False
    otel_endpoint: Annotated[
        str | None,
        Meta(description="the OTLP/HTTP collector for them, as http://HOST:4318; it turns otel on"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="how much is logged")
    ] = "info"
    log_json: Annotated[bool, Meta(description="log lines as JSON objects")] = False
    limits: Limits = Limits()


def options() -> Iterator[Option]:
    """Every setting, in the order of declaration; limits come last."""
    yield from options_of(Settings, (), "")
    yield from options_of(Limits, ("limits",), "limit_")


def adapters_of(settings: Settings) -> dict[str, str]:
    """`["poet=poet.gguf"]` gives `{"poet": "poet.gguf"}`."""
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
    """The settings of a process: file, then environment, then flags (by option name)."""
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
    """`change_settings(settings, {"port": 9000})`: checked like everything else."""
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
            # Somebody meant to have a key. Without one everybody is served.
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
