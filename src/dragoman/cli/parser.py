"""The argument parser: flags made from the settings, and errors that suggest the nearest flag."""

import argparse
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from dragoman import settings
from dragoman.cli.exits import USAGE, CommandError
from dragoman.options import ENV_PREFIX, Option

SETTING = "setting_"
GROUPS: dict[str, frozenset[str]] = {
    "model": frozenset(
        {"model", "model_name", "model_alias", "any_model", "chat_template", "lora", "lora_dir"}
    ),
    "multiple models": frozenset(
        {"models", "models_dir", "models_from_cache", "models_max", "models_autoload"}
        | {"memory_limit", "sleep_idle_seconds", "while_loading"}
    ),
    "dialect": frozenset(
        {"dialect", "tool_call_parser", "reasoning_parser", "reasoning_open", "reasoning_close"}
    ),
    "server": frozenset(
        {"host", "port", "ollama_port", "uds", "uds_mode", "reuse_port", "tls_cert", "tls_key", "root_path"}
        | {"unknown_fields", "keep_alive", "write_interval", "request_timeout", "shutdown_grace"}
    ),
    "access control": frozenset(
        {"api_key", "api_key_file", "admin_key", "admin_key_file", "allow_media_host"}
        | {"insecure", "metrics", "metrics_names", "allow_host", "cors_origin", "forwarded_allow_ips"}
    ),
    "timeouts": frozenset({"header_timeout", "body_timeout", "write_timeout", "idle_timeout"}),
    "engine": frozenset(
        {"engine", "engine_args", "context", "slots", "threads", "runner", "guesses"}
        | {
            "kv_memory",
            "kv_cache",
            "weights",
            "gpu_layers",
            "draft",
            "mmproj",
            "mmproj_auto",
            "readers",
            "deterministic",
            "unconstrained",
        }
    ),
    "requests": frozenset({"sampling", "override", "presets", "restore_reasoning"}),
    "upstreams": frozenset({"upstream", "upstream_key", "tokenizer"}),
    "store": frozenset(
        {"store", "data_dir", "files_dir", "store_max_bytes", "store_max_age", "trajectories"}
    ),
    "mcp": frozenset({"mcp_config", "mcp_allow", "mcp_timeout"}),
    "logging": frozenset({"log_level", "log_json", "otel", "otel_endpoint"}),
    "limits": frozenset(o.name for o in settings.options() if o.path[0] == "limits"),
}
METAVARS = {
    "engine": "NAME",
    "model": "FILE",
    "api_key_file": "FILE",
    "admin_key_file": "FILE",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "uds": "PATH",
    "forwarded_allow_ips": "ADDRESS",
    "chat_template": "FILE_OR_NAME",
    "lora": "NAME=FILE",
    "lora_dir": "FOLDER",
    "files_dir": "FOLDER",
    "dialect": "NAME",
    "tool_call_parser": "NAME",
    "reasoning_parser": "NAME",
    "reasoning_open": "TAG",
    "reasoning_close": "TAG",
    "store": "WHERE",
    "mcp_config": "FILE",
    "mcp_allow": "HOST",
    "allow_media_host": "HOST",
    "engine_args": "JSON",
    "sampling": "JSON",
    "override": "JSON",
    "presets": "JSON",
    "models": "JSON",
    "models_dir": "FOLDER",
    "memory_limit": "MIB",
    "upstream": "URL",
    "otel_endpoint": "URL",
    "tokenizer": "FOLDER",
    "context": "N",
    "slots": "N",
    "threads": "N",
    "guesses": "N",
    "readers": "N",
    "gpu_layers": "N",
    "draft": "MODEL",
    "mmproj": "FILE",
}
ALIASES = {
    "gpu_layers": ("-ngl", "--n-gpu-layers"),
    "draft": ("-md", "--model-draft"),
    "mmproj": ("-mm",),
}
"""llama-server's names of flags."""
DENIALS = {"mmproj_auto": "--no-mmproj"}
"""llama-server's flags that turn a setting off."""
# Variables that are not settings.
OTHER_VARIABLES = frozenset({ENV_PREFIX + "CONFIG", ENV_PREFIX + "CACHE"})


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises where argparse prints and exits, so that all errors have one format."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(_sentence(message), f"Run `{self.prog} --help` for usage.", exit_code=USAGE)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise an error for unknown arguments, with the nearest existing flag."""
        flag = next((word for word in unknown if word.startswith("-")), unknown[0])
        name = flag.partition("=")[0]
        what = "flag" if name.startswith("-") else "argument"
        near = nearest(name, self._option_string_actions)
        hint = f"Did you mean {near}? " if near else ""
        raise CommandError(
            f"`{self.prog}` has no {what} {name}.",
            f"{hint}`{self.prog} --help` lists them all.",
            exit_code=USAGE,
        )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar word: `nearest("--prot", ["--host", "--port"])` is `--port`."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)), None)


def _sentence(message: str) -> str:
    return message[:1].upper() + message[1:].rstrip(".") + "."


def add_settings(parser: argparse.ArgumentParser, groups: Sequence[str] = tuple(GROUPS)) -> None:
    """Add flags for the settings of these groups; settings without a group go under "other"."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"settings file [default: {settings.DEFAULT_FILE}, if present; env: {ENV_PREFIX}CONFIG]",
    )
    known = frozenset[str]().union(*GROUPS.values())
    for title in groups:
        _add_group(parser, title, [o for o in settings.options() if o.name in GROUPS[title]])
    if set(groups) == set(GROUPS):
        _add_group(parser, "other", [o for o in settings.options() if o.name not in known])


def _add_group(parser: argparse.ArgumentParser, title: str, options: Sequence[Option]) -> None:
    group = parser.add_argument_group(title)
    for option in options:
        dest, text = SETTING + option.name, _help(option)
        if option.is_bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(option.flag, dest=dest, action=action, default=argparse.SUPPRESS, help=text)
            if option.name in DENIALS:
                group.add_argument(
                    DENIALS[option.name],
                    dest=dest,
                    action="store_false",
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )
        elif option.choices:
            group.add_argument(
                option.flag, dest=dest, choices=option.choices, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(
                option.flag,
                *ALIASES.get(option.name, ()),
                dest=dest,
                metavar=_metavar(option),
                action="append" if option.is_list else "store",
                default=argparse.SUPPRESS,
                help=text,
            )


def _metavar(option: Option) -> str:
    usual = "N" if isinstance(option.default, int | float) else option.name.rpartition("_")[2].upper()
    return METAVARS.get(option.name, usual)


def _help(option: Option) -> str:
    """Format a help text: `address to listen on [default: 127.0.0.1; env: DRAGOMAN_HOST]`"""
    notes = [f"env: {option.env}"]
    if option.is_list:
        notes.append("may be given several times")
    elif option.default is not None and not option.is_object:
        shown = str(option.default).lower() if option.is_bool else str(option.default)
        notes.insert(0, f"default: {shown}")
    return f"{option.help} [{'; '.join(notes)}]".replace("%", "%%")


def read_settings(args: argparse.Namespace, **overrides: object) -> settings.Settings:
    """Load a command's settings; its flags override the environment, which overrides the file."""
    flags = {
        name.removeprefix(SETTING): value for name, value in vars(args).items() if name.startswith(SETTING)
    }
    flags |= {name: value for name, value in overrides.items() if value is not None}
    return settings.load(flags, file=getattr(args, "config", None))


def stray_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable with our prefix that is not a setting."""
    known = {option.env for option in settings.options()} | OTHER_VARIABLES
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            near = nearest(name, known)
            yield f"{name} is not a setting{f'; did you mean {near}?' if near else '.'}"


def positive(text: str) -> int:
    """Parse a flag that takes a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="MODEL",
        nargs="?",
        help="GGUF file, folder, or name such as hf:ORG/REPO:Q4_K_M [default: a small model, downloaded]",
    )
    parser.add_argument("-hf", dest="hub_name", metavar="ORG/REPO[:QUANT]", help="same as MODEL hf:ORG/REPO")


def model_settings(args: argparse.Namespace) -> settings.Settings:
    """Load the settings of a command that also takes MODEL as an argument."""
    if args.hub_name is not None:
        if args.file is not None:
            raise CommandError(
                "The model is given twice, as MODEL and with -hf.", "Keep one.", exit_code=USAGE
            )
        args.file = f"hf:{args.hub_name.removeprefix('hf:')}"
    if args.file is not None and SETTING + "model" in vars(args):
        raise CommandError(
            "The model is given twice, as MODEL and with --model.", "Keep one.", exit_code=USAGE
        )
    return read_settings(args, model=args.file)


def add_connection(parser: argparse.ArgumentParser, url: str | None = None) -> None:
    shown = f" [default: {url}]" if url else ""
    parser.add_argument("--url", metavar="URL", default=url, help=f"base URL of a running server{shown}")
    parser.add_argument(
        "--api-key", metavar="KEY", help="the server's key [env: DRAGOMAN_API_KEY or OPENAI_API_KEY]"
    )
