"""Writes the tables of the documentation from the code: `python -m tools.docgen`.

A table stands between the comments `<!-- table: NAME -->` and `<!-- end -->`; everything else in a file is
left alone. What the code cannot say is in docs/notes.toml; a note too many or too few is an error.
"""

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import getsource
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from bench import documented
from bench.documented import Figure
from msgspec import NODEFAULT, Struct, inspect
from msgspec.structs import FieldInfo, fields
from tests.clients.table import CLIENTS

from dragoman import errors, settings
from dragoman.api.chat.request import ChatRequest, MessageBody
from dragoman.api.compat_fields import CHANGED, HARMLESS_BY_REASON, REFUSED, RENAMED
from dragoman.api.completions import CompletionRequest
from dragoman.api.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from dragoman.api.inspection import ParseAnswerRequest, ParseCallsRequest, ParseReasoningRequest
from dragoman.api.messages.blocks import BLOCKS, REFUSED_BLOCKS, WHERE
from dragoman.api.messages.request import MessagesRequest
from dragoman.api.responses.request import ResponseRequest
from dragoman.api.sampling_fields import ConstraintFields, NoEffectFields, SamplerFields
from dragoman.api.shared_fields import SharedFields, TemplateFields
from dragoman.constrain.schema import rewrites
from dragoman.constrain.schema.keywords import KEYWORDS
from dragoman.dialects.registry import list_dialects
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.remote.upstreams import RemoteOptions
from dragoman.http.routes import table as routing
from dragoman.options import Option

FIGURES = sorted({command.table for command in documented.read()} - {""})
ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dragoman"
DOCS = sorted((ROOT / "docs").glob("*.md"))
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
POWERS = {2**31 - 1: "2^31-1", -(2**31): "-2^31", 2**63 - 1: "2^63-1", -(2**63): "-2^63"}


class NotesError(Exception):
    """The notes and the code do not name the same things."""


def rewritten(text: str) -> str:
    """The text of a document with every table in it made anew."""
    return TABLE.sub(lambda match: f"{match[1]}{TABLES[match['name']]()}\n{match[3]}", text)


def main() -> None:
    for path in DOCS:
        before = path.read_text()
        after = rewritten(before)
        if after != before:
            path.write_text(after)
            sys.stdout.write(f"{path.relative_to(ROOT)} is new\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`table(["a"], [["1"]])` is a Markdown table of one column and one row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def notes(section: str, names: Iterable[str]) -> Mapping[str, str]:
    """The notes of a section, which must be there for these names and for no others."""
    mapping: dict[str, str] = tomllib.loads((ROOT / "docs" / "notes.toml").read_text())[section]
    if wrong := set(mapping) ^ set(names):
        raise NotesError(f"[{section}] in docs/notes.toml and the code differ in: {', '.join(sorted(wrong))}")
    return mapping


def field_table(struct: type[Struct], section: str, without: type[Struct] | None = None) -> str:
    inherited = {spec.name for spec in fields(without)} if without else set()
    own = [spec for spec in fields(struct) if spec.name not in inherited]
    mapping = notes(section, [spec.name for spec in own])
    return table(("field", "type", "note"), [field_row(spec, mapping[spec.name]) for spec in own])


def field_row(spec: FieldInfo, note: str) -> tuple[str, str, str]:
    kind = inspect.type_info(spec.type)
    required = " (required)" if spec.required else ""
    return f"`{spec.name}`{required}", ", ".join(filter(None, (spell(kind), bounds(kind)))), note


def spell(kind: inspect.Type) -> str:
    """`list[int] | None` is "list of integer": null is allowed everywhere and said once."""
    if isinstance(kind, inspect.UnionType):
        return " or ".join(spell(one) for one in _present(kind))
    if isinstance(kind, inspect.ListType):
        return f"list of {spell(kind.item_type)}"
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    names = {
        inspect.IntType: "integer",
        inspect.FloatType: "number",
        inspect.StrType: "string",
        inspect.BoolType: "boolean",
        inspect.NoneType: "null",
        inspect.AnyType: "any",
    }
    return names.get(type(kind), "object")


def bounds(kind: inspect.Type) -> str:
    """`Annotated[int, Meta(ge=1)]` is "at least 1"."""
    if isinstance(kind, inspect.UnionType):
        return ", ".join(filter(None, (bounds(one) for one in _present(kind))))
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return _between(kind.ge, kind.le) if kind.gt is None else f"above {kind.gt}, to {kind.le}"
    if isinstance(kind, inspect.StrType):
        return f"up to {kind.max_length} characters" if kind.max_length else ""
    if isinstance(kind, inspect.ListType):
        each = bounds(kind.item_type)
        least = f"at least {kind.min_length}" if kind.min_length else ""
        return least or (f"each {each}" if each else "")
    if isinstance(kind, inspect.DictType):
        each = bounds(kind.value_type)
        most = f"up to {kind.max_length} entries" if kind.max_length else ""
        return ", ".join(filter(None, (most, f"each {each}" if each else "")))
    return ""


def _present(kind: inspect.UnionType) -> Sequence[inspect.Type]:
    return [one for one in kind.types if not isinstance(one, inspect.NoneType)]


def _between(least: float | None, most: float | None) -> str:
    if least is None and most is None:
        return ""
    return f"{_number(least)} to {_number(most)}"


def _number(value: float | None) -> str:
    return POWERS.get(int(value), f"{value:g}") if value is not None else "any"


def harmless() -> str:
    own = " ".join(f"`{spec.name}`" for spec in fields(NoEffectFields))
    others = [
        (what, " ".join(f"`{name}`" for name in names.split())) for what, names in HARMLESS_BY_REASON.items()
    ]
    return table(("about", "fields"), [("who asks, and how it is kept", own), *others])


def echoed() -> str:
    return ", ".join(f"`{name}`" for name in sorted(MessageBody.echoed))


def other_names() -> str:
    names: dict[str, list[str]] = {}
    for other, own in RENAMED.items():
        names.setdefault(own, []).append(f"`{other}`")
    renamed = [(" ".join(others), f"`{own}`") for own, others in names.items()]
    return table(("theirs", "here"), [*renamed, *((f"`{name}`", what) for name, what in CHANGED.items())])


def unsupported() -> str:
    reasons: dict[str, list[str]] = {}
    for name, (reason, off) in REFUSED.items():
        without = ", ".join(f"`{value}`" for value in off)
        reasons.setdefault(reason, []).append(f"`{name}`" + (f" (but for {without})" if without else ""))
    return table(("because", "fields"), [(reason, ", ".join(names)) for reason, names in reasons.items()])


def routes() -> str:
    known = {f"{one.method.upper()} {one.path}": one.summary for one in routing.operations()}
    tables = {"POST": routing.POST, "GET": routing.GET, "DELETE": routing.DELETE}
    served = [f"{method} {path}" for method, paths in tables.items() for path in paths]
    served = [route.replace("{model:path}", "{model}") for route in served]
    mapping = notes("routes", [route for route in served if route not in known])
    rows = {**known, **mapping}
    return table(("route", "what it does"), [(f"`{route}`", what) for route, what in rows.items()])


def error_table() -> str:
    kinds = [kind for kind in vars(errors).values() if _is_error(kind)]
    mapping = notes("errors", [kind.__name__ for kind in kinds])
    rows = [(f"`{kind.__name__}`", *_over_http(kind), mapping[kind.__name__]) for kind in kinds]
    return table(("error", "status", "type", "code", "when"), rows)


def _is_error(value: object) -> TypeGuard[type[errors.DragomanError]]:
    return isinstance(value, type) and issubclass(value, errors.DragomanError)


def _over_http(kind: type[errors.DragomanError]) -> tuple[str, str, str]:
    """Status, type and code; nothing for errors that only a process at its start can meet."""
    if not {"status", "type", "code"} & set(vars(kind)):
        return "", "", ""
    return str(kind.status), f"`{kind.type}`", f"`{kind.code}`" if kind.code else ""


def code_table() -> str:
    """The codes that are given where an error is raised, rather than by its class."""
    mapping: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        mapping |= _codes(ast.parse(path.read_text()))
    result = notes("codes", mapping)
    rows = [(f"`{code}`", f"`{mapping[code]}`", result[code]) for code in sorted(mapping)]
    return table(("code", "error", "when"), rows)


def _codes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            for word in call.keywords:
                if word.arg == "code" and isinstance(word.value, ast.Constant):
                    yield str(word.value.value), call.func.id


def setting_table(*, limits: bool) -> str:
    chosen = [option for option in settings.options() if (option.path[0] == "limits") == limits]
    rows = [(f"`{one.flag}`", _default(one.default), _help(one)) for one in chosen]
    return table(("flag", "default", "meaning"), rows)


def _default(value: Any) -> str:
    if value is None or value in ([], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _help(option: Option) -> str:
    choices = ", ".join(f"`{choice}`" for choice in option.choices)
    return f"{option.help}: {choices}" if len(option.choices) > 1 else option.help


def engine_options(struct: type[Struct]) -> str:
    """The options of an engine with the strings that stand below the fields."""
    tree = ast.parse(textwrap.dedent(getsource(struct)))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    mapping = {
        declared.target.id: text.value.value
        for declared, text in pairwise(body)
        if isinstance(declared, ast.AnnAssign)
        and isinstance(declared.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    rows = [(f"`{spec.name}`", _option_default(spec), str(mapping[spec.name])) for spec in fields(struct)]
    return table(("option", "default", "meaning"), rows)


def _option_default(spec: FieldInfo) -> str:
    return "" if spec.default is NODEFAULT or spec.default is None else f"`{spec.default}`"


def dialect_table() -> str:
    rows = [
        (f"`{one.name}`", one.models, " ".join(f"`{name}`" for name in one.aliases))
        for one in list_dialects().values()
    ]
    return table(("name", "models", "aliases"), rows)


def schema_words(fate: str) -> str:
    rows = [(f"`{row.name}`", row.note) for row in KEYWORDS.values() if row.handling == fate]
    return table(("word", "how far" if fate == "enforced" else "instead"), rows)


def schema_notes() -> str:
    names = [
        f"`{row.name}`" + (f" ({row.note})" if row.note else "")
        for row in KEYWORDS.values()
        if row.handling == "note"
    ]
    return ", ".join(names)


def format_table() -> str:
    rows = [(f"`{name}`", rewrites.NOTES.get(name, "")) for name in sorted(rewrites.KNOWN)]
    return table(("format", "note"), rows)


def block_table() -> str:
    """The blocks of Messages, where they may stand, and what becomes of them."""
    mapping = notes("blocks", BLOCKS)
    positions = {kind: ", ".join(role for role, kinds in WHERE.items() if kind in kinds) for kind in BLOCKS}
    reasons: dict[str, list[str]] = {}
    for kind, reason in REFUSED_BLOCKS.items():
        reasons.setdefault(reason, []).append(f"`{kind}`")
    rows = [(f"`{kind}`", positions[kind], mapping[kind]) for kind in BLOCKS]
    refused = [(", ".join(kinds), "nowhere", f"refused: {reason}") for reason, kinds in reasons.items()]
    return table(("block", "in", "what becomes of it"), [*rows, *refused])


def client_table() -> str:
    """`make clients` runs these."""
    return ", ".join(f"{client.name} {client.version}" for client in CLIENTS) + "."


def figure_table(name: str) -> str:
    """The ratios of docs/figures.toml that belong to one table, and how they were measured."""
    commands = [command for command in documented.read() if command.table == name]
    rows = [_figure_row(figure) for command in commands for figure in command.figures]
    measured = {
        f"{command.date}, commit {command.commit}, {command.hardware}": command.rounds for command in commands
    }
    notes = "; ".join(f"{rounds} rounds, {when}" for when, rounds in measured.items())
    return f"{table(('', 'dragoman / peer', 'ratio'), rows)}\n\nMeasured: {notes}."


def _figure_row(figure: Figure) -> Sequence[str]:
    values = [f"{value:,g}" for value in (figure.ours, figure.theirs) if value]
    both = f"{' / '.join(values)} {figure.unit}" if values else ""
    spread = f" ({figure.least:g} to {figure.most:g})" if figure.least and figure.most else ""
    ratio = f"{figure.ratio:.2f}x" if figure.ratio >= 0.1 else f"{figure.ratio:.1%}"
    return figure.name, both, ratio + spread


TABLES: Mapping[str, Callable[[], str]] = {
    "shared": lambda: field_table(SharedFields, "shared", without=SamplerFields),
    "samplers": lambda: field_table(SamplerFields, "samplers", without=ConstraintFields),
    "constraints": lambda: field_table(ConstraintFields, "constraints", without=NoEffectFields),
    "chat": lambda: field_table(ChatRequest, "chat", without=SharedFields),
    "completions": lambda: field_table(CompletionRequest, "completions", without=SharedFields),
    "responses": lambda: field_table(ResponseRequest, "responses", without=TemplateFields),
    "messages": lambda: field_table(MessagesRequest, "messages", without=TemplateFields),
    "blocks": block_table,
    "message": lambda: field_table(MessageBody, "message"),
    "embeddings": lambda: field_table(EmbeddingRequest, "embeddings"),
    "rerank": lambda: field_table(RerankRequest, "rerank"),
    "score": lambda: field_table(ScoreRequest, "score"),
    "parse-answer": lambda: field_table(ParseAnswerRequest, "parse-answer"),
    "parse-calls": lambda: field_table(ParseCallsRequest, "parse-calls"),
    "parse-reasoning": lambda: field_table(ParseReasoningRequest, "parse-reasoning"),
    "harmless": harmless,
    "echoed": echoed,
    "other-names": other_names,
    "unsupported": unsupported,
    "routes": routes,
    "errors": error_table,
    "codes": code_table,
    "settings": lambda: setting_table(limits=False),
    "limits": lambda: setting_table(limits=True),
    "local-options": lambda: engine_options(LocalOptions),
    "remote-options": lambda: engine_options(RemoteOptions),
    "dialects": dialect_table,
    "schema-words": lambda: schema_words("enforced"),
    "refused-words": lambda: schema_words("refused"),
    "schema-notes": schema_notes,
    "formats": format_table,
    "clients": client_table,
    **{f"figures-{name}": partial(figure_table, name) for name in FIGURES},
}

if __name__ == "__main__":
    main()
