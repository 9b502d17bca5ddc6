"""Print the shell completion script: commands, flags, choices, and the models on this machine."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator

from msgspec import Struct

SUMMARY = "completion for bash, zsh or fish"
EXAMPLE = """\
examples:
  dragoman completion bash > ~/.local/share/bash-completion/completions/dragoman
  dragoman completion zsh > "${fpath[1]}/_dragoman"       before compinit is called
  dragoman completion fish > ~/.config/fish/completions/dragoman.fish
"""
LIST_NAMES = "dragoman list --names 2>/dev/null"
FILES = frozenset({"FILE", "FOLDER", "DIR", "FILE_OR_NAME", "MODEL", "NAME|FILE"})
DIALECTS = frozenset({"dialect", "tool_call_parser", "reasoning_parser"})


class ShellCandidates(Struct, frozen=True):
    """Completions at one position of a command line."""

    words: tuple[str, ...] = ()
    models: bool = False
    files: bool = False


class FlagCompletion(Struct, frozen=True):
    names: tuple[str, ...]
    help: str
    value: ShellCandidates | None
    """None if the flag takes no value."""


class CommandCompletion(Struct, frozen=True):
    path: tuple[str, ...]
    help: str
    flags: tuple[FlagCompletion, ...]
    positionals: tuple[ShellCandidates, ...]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), help="shell that will load the script")


def run(args: argparse.Namespace) -> int:
    from dragoman.cli import build

    print(SHELLS[args.shell](list(_commands(build()[0], (), ""))))
    return 0


# Commands and flags, read from the parser.


def _commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...], help: str
) -> Iterator[CommandCompletion]:
    """Yield the command of a parser, then its subcommands."""
    flags, positions = [], []
    below: list[tuple[str, argparse.ArgumentParser, str]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below += [(name, child, helps.get(name, "")) for name, child in action.choices.items()]
            positions.append(ShellCandidates(tuple(action.choices)))
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            value = None if action.nargs == 0 else _offer(action)
            flags.append(FlagCompletion(tuple(action.option_strings), _first_sentence(action.help), value))
        else:
            positions.append(_offer(action))
    yield CommandCompletion(path, help, tuple(flags), tuple(positions))
    for name, child, text in below:
        yield from _commands(child, (*path, name), text)


def _offer(action: argparse.Action) -> ShellCandidates:
    if action.choices:
        return ShellCandidates(tuple(map(str, action.choices)))
    name = action.dest.removeprefix("setting_")
    if name in DIALECTS:
        from dragoman.dialects.registry import list_dialects

        return ShellCandidates(("auto", *list_dialects()))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    is_model = metavar == "MODEL" or name == "model"
    return ShellCandidates(models=is_model, files=metavar in FILES)


def _first_sentence(help: str | None) -> str:
    """Cut a help text: `the port; 0 takes a free one [default: 8000]` becomes `the port`."""
    return re.split(r"[;:\[]", (help or "").replace("%%", "%"), maxsplit=1)[0].strip()


# The three shells.


def write_bash(commands: list[CommandCompletion]) -> str:
    paths = "|".join(f'"{" ".join(("", *c.path))}"' for c in commands if c.path)
    flags, params = [], []
    for command in commands:
        path = " ".join(("", *command.path))
        for flag in command.flags:
            if flag.value is not None:
                names = "|".join(f'"{path} {name}"' for name in flag.names)
                flags.append(f"    {names}) {_bash_offer(flag.value)}; return ;;")
        words = " ".join(name for flag in command.flags for name in flag.names)
        offers = "; ".join(
            _bash_offer(candidates) for candidates in command.positionals if candidates != ShellCandidates()
        )
        params.append(
            f'    "{path}") case $cur in -*) _dragoman_words "{words}" ;; *) {offers or ":"} ;; esac ;;'
        )
    return _BASH % {"paths": paths, "flags": "\n".join(flags), "places": "\n".join(params)}


def _bash_offer(offer: ShellCandidates) -> str:
    texts = [f'_dragoman_words "{" ".join(offer.words)}"'] if offer.words else []
    texts += [f'_dragoman_words "$({LIST_NAMES})"'] if offer.models else []
    texts += ["_dragoman_files"] if offer.files else []
    return "; ".join(texts) or ":"


# Bash splits a line at "=" and ":", which occur in our flags and names: the word to complete is taken from
# the line itself, and the part that bash counts as an earlier word is removed from each completion.
_BASH = """\
_dragoman_words() {
    local cut=${cur%%"${cur##*[=:]}"} word
    while IFS= read -r word; do
        COMPREPLY+=("${word#"$cut"}")
    done < <(compgen -W "$1" -- "$cur")
}
_dragoman_files() {
    local word
    compopt -o filenames
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(compgen -f -- "${cur##*[=:]}")
}
_dragoman() {
    local line=${COMP_LINE:0:COMP_POINT} cur before path="" word
    COMPREPLY=()
    cur=${line##*[[:space:]]}
    before=${line%%"$cur"}
    local -a words
    read -ra words <<<"$before"
    for word in "${words[@]:1}"; do
        case "$path $word" in %(paths)s) path="$path $word" ;; esac
    done
    word=${words[${#words[@]}-1]}
    case $cur in --*=*) word=${cur%%%%=*} cur=${cur#*=} ;; esac
    case "$path $word" in
%(flags)s
    esac
    case $path in
%(places)s
    esac
}
complete -F _dragoman dragoman"""


def write_zsh(commands: list[CommandCompletion]) -> str:
    texts = []
    for command in commands:
        below = [c for c in commands if c.path[:-1] == command.path and c.path]
        rows = [row for flag in command.flags for row in _zsh_flag(flag)]
        if below:
            rows += ["'1: :->command'", "'*:: :->rest'"]
        else:
            rows += [
                f"'{n}:{_zsh_offer(offer)}'"
                for n, offer in enumerate(command.positionals, 1)
                if offer != ShellCandidates()
            ]
        body = (
            f"    _arguments -s {' '.join(rows)}\n"
            if not below
            else _ZSH_BELOW
            % {
                "rows": " ".join(rows),
                "named": " ".join(shlex.quote(f"{c.path[-1]}:{c.help}") for c in below),
                "cases": " ".join(f"{c.path[-1]}) {_zsh_name(c)} ;;" for c in below),
            }
        )
        texts.append(f"{_zsh_name(command)}() {{\n{body}}}")
    return "\n".join(["#compdef dragoman", _ZSH_MODELS, *texts, _ZSH_END])


def _zsh_name(command: CommandCompletion) -> str:
    return "_".join(("_dragoman", *command.path))


def _zsh_flag(flag: FlagCompletion) -> Iterator[str]:
    """Format a flag: `'--port[port to listen on]:value:'`"""
    text = re.sub(r"([\[\]:\\])", r"\\\1", flag.help)
    value = "" if flag.value is None else f":{_zsh_offer(flag.value)}"
    for name in flag.names:
        joined = "=" if value and name.startswith("--") else ""
        yield shlex.quote(f"*{name}{joined}[{text}]{value}")


def _zsh_offer(offer: ShellCandidates) -> str:
    if offer.words:
        return f"value:({' '.join(offer.words)})"
    if offer.models:
        return "model:__dragoman_names"
    return "file:_files" if offer.files else "value: "


_ZSH_MODELS = f"""\
__dragoman_names() {{
    local -a names
    names=(${{(f)"$({LIST_NAMES})"}})
    compadd -a names
    _files
}}"""
_ZSH_BELOW = """\
    local curcontext=$curcontext state line
    typeset -A opt_args
    _arguments -C %(rows)s
    case $state in
        command)
            local -a commands
            commands=(%(named)s)
            _describe command commands ;;
        rest)
            case $line[1] in %(cases)s esac ;;
    esac
"""
_ZSH_END = """\
if [ "$funcstack[1]" = "_dragoman" ]; then _dragoman "$@"; else compdef _dragoman dragoman; fi"""


def write_fish(commands: list[CommandCompletion]) -> str:
    lines = ["complete -c dragoman -f"]
    for command in commands:
        where = f"-n {shlex.quote(_fish_condition(command, commands))}"
        if command.path:
            above = next(c for c in commands if c.path == command.path[:-1])
            condition = shlex.quote(_fish_condition(above, commands))
            lines.append(
                f"complete -c dragoman -n {condition} -a {command.path[-1]} -d {_quoted(command.help)}"
            )
        lines += [f"complete -c dragoman {where} {_fish_flag(flag)}" for flag in command.flags]
        if not any(c.path[:-1] == command.path and c.path for c in commands):
            offers = [
                _fish_offer(candidates)
                for candidates in command.positionals
                if candidates != ShellCandidates()
            ]
            lines += [f"complete -c dragoman {where} {offer}" for offer in offers]
    return "\n".join(lines)


def _fish_condition(command: CommandCompletion, commands: list[CommandCompletion]) -> str:
    """Return fish's test that all words of the command's path are present, and none of its subcommands."""
    below = [c.path[-1] for c in commands if c.path and c.path[:-1] == command.path]
    texts = [f"__fish_seen_subcommand_from {word}" for word in command.path]
    texts += [f"not __fish_seen_subcommand_from {' '.join(below)}"] if below else []
    return "; and ".join(texts) or "true"


def _fish_flag(flag: FlagCompletion) -> str:
    kinds = {2: "-l", 1: "-s"}
    names = []
    for name in flag.names:
        bare = name.lstrip("-")
        kind = kinds[2] if name.startswith("--") else kinds[1] if len(bare) == 1 else "-o"
        names.append(f"{kind} {bare}")
    value = "" if flag.value is None else f" {_fish_offer(flag.value)}"
    return f"{' '.join(names)}{value} -d {_quoted(flag.help)}"


def _fish_offer(offer: ShellCandidates) -> str:
    words = [" ".join(offer.words)] if offer.words else []
    words += [f"({LIST_NAMES})"] if offer.models else []
    text = f" -a {shlex.quote(' '.join(words))}" if words else ""
    return f"{'-r -F' if offer.files else '-x'}{text}"


def _quoted(text: str) -> str:
    """Quote for fish: quotes are escaped with a backslash, because a word cannot mix quoted and bare
    parts.
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[list[CommandCompletion]], str]] = {
    "bash": write_bash,
    "zsh": write_zsh,
    "fish": write_fish,
}
