"""Calls in a model's own syntax, as the renderer writes them, with arguments in their tools' schemas."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from dragoman.constrain.calls.literal_grammar import JSON, PYTHON, Literals, LiteralStyle, brace_style
from dragoman.constrain.calls.schema_parts import SchemaPlace, Schemas
from dragoman.constrain.calls.tagged_grammar import Tags
from dragoman.constrain.calls.tool_schemas import ToolSchema
from dragoman.constrain.grammar.rules import GrammarPart, Rules, Symbol, either, literal, regex
from dragoman.constrain.schema.json_schema import EXACT, write_json
from dragoman.dialects.declare import (
    AttributedCalls,
    BraceCalls,
    Calls,
    CallShape,
    Dialect,
    JsonCalls,
    KeyedCalls,
    NamedCalls,
    PythonCalls,
    PythonObjects,
    TaggedCalls,
)
from dragoman.dialects.schema import ArgumentPlace, quote_json

ID = "[a-zA-Z0-9_.:-]{1,64}"
IDS = {"mistral": "[a-zA-Z0-9]{9}", "first": "[a-zA-Z0-9]{10}"}
INDEX = "(?:0|[1-9][0-9]{0,2})"
COUNT = "[1-9][0-9]{0,2}"
KEYWORD = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"


class Way(Struct, frozen=True):
    """Calls that share one opening."""

    head: str
    """What they begin with, as text."""
    body: Symbol
    """Everything after that."""


class CallLayout(Struct, frozen=True):
    """How the calls of an answer are put together."""

    ways: tuple[Way, ...]
    between: str | None = None
    """Between one group and the next; None: all calls are in one."""


class CallGrammar:
    """The calls of some tools in the syntax of one dialect."""

    def __init__(
        self, rules: Rules, dialect: Dialect, tools: Sequence[ToolSchema], *, parallel: bool
    ) -> None:
        self.rules = rules
        self.tools = tools
        self.parallel = parallel
        self.banned = "".join(one for one, _ in dialect.replaced)

    def group(self, shape: Calls) -> CallLayout:
        if isinstance(shape, JsonCalls):
            return self._objects(shape)
        if isinstance(shape, PythonCalls):
            return self._expressions(shape)
        calls = [self._call(shape, tool) for tool in self.tools]
        section, separate = shape.section, shape.between if self.parallel else None
        if section is None:
            return CallLayout(self._ways(shape.open[0], calls, shape.closing), separate)
        if section.each:
            closing = shape.closing + "".join(section.close[:1])
            return CallLayout(self._ways(section.open[0] + shape.open[0], calls, closing), separate)
        further = self._more(self._one(calls, shape.closing, shape.between + shape.open[0]))
        # A newline that ends the last call also begins the end of the section.
        close = section.close[0].removeprefix("\n" if shape.closing.endswith("\n") else "")
        first = self._one(calls, shape.closing)
        body = self.rules.rule(self.rules.sequence(first, further, close))
        return CallLayout((Way(section.open[0] + shape.open[0], body),))

    def _ways(self, opening: str, calls: Sequence[Sequence[GrammarPart]], closing: str) -> tuple[Way, ...]:
        return (Way(opening, self._one(calls, closing)),)

    def _one(self, calls: Sequence[Sequence[GrammarPart]], closing: str, opening: str = "") -> Symbol:
        """One call of any tool."""
        return self.rules.rule(
            either(self.rules.rule(self.rules.sequence(opening, *parts, closing)) for parts in calls)
        )

    def _more(self, further: Symbol) -> Symbol:
        return Symbol(f"({further})*" if self.parallel else "")

    # A JSON object or a Python expression for each call

    def _objects(self, shape: JsonCalls) -> CallLayout:
        objects = [self._object(shape, tool) for tool in self.tools]
        opening, closing = shape.open[0] if shape.open else "", shape.closing
        section = shape.section
        if section is not None and section.each:
            opening, closing = section.open[0] + opening, closing + "".join(section.close[:1])
        if shape.list == "must":
            return CallLayout(self._write_list(shape, objects, opening, closing, self._more))
        if shape.list == "may":
            alone = self._ways_of(objects, opening, [closing])
            several = self._write_list(
                shape, objects, opening, closing, lambda further: Symbol(f"({further})+")
            )
            return CallLayout(alone + (several if self.parallel else ()))
        if shape.several:
            further = self._more(self._any(objects, shape.separator))
            return CallLayout(self._ways_of(objects, opening, [further, closing]))
        return CallLayout(
            self._ways_of(objects, opening, [closing]), shape.between if self.parallel else None
        )

    def _write_list(
        self,
        shape: JsonCalls,
        objects: list[tuple[str, Symbol]],
        opening: str,
        closing: str,
        more: Callable[[Symbol], Symbol],
    ) -> tuple[Way, ...]:
        lead, separator, end = ("[", shape.separator, "]")
        if shape.indent:
            lead, separator, end = f"[\n{shape.indent}", f",\n{shape.indent}", "\n]"
        further = more(self._any(objects, separator))
        return self._ways_of(objects, opening + lead, [further, end + closing])

    def _any(self, objects: list[tuple[str, Symbol]], lead: str = "") -> Symbol:
        """One call of any tool. What leads it in is one lexeme with its beginning: it must not be hidden by a
        closing marker that begins with the same character."""
        return self.rules.rule(either(self.rules.sequence(lead + head, body) for head, body in objects))

    def _ways_of(
        self, objects: list[tuple[str, Symbol]], opening: str, rest: Sequence[GrammarPart]
    ) -> tuple[Way, ...]:
        if opening.strip() not in ("", "["):
            return (Way(opening, self.rules.rule(self.rules.sequence(self._any(objects), *rest))),)
        # Without a marker it is the name of a tool that tells a call from text.
        return tuple(
            Way(opening + head, self.rules.rule(self.rules.sequence(body, *rest))) for head, body in objects
        )

    def _object(self, shape: JsonCalls, tool: ToolSchema) -> tuple[str, Symbol]:
        """The beginning of an object, which has the name in it where no id may come first; and the rest."""
        if isinstance(shape, PythonObjects):
            head = f"{{{shape.name[0]!r}: {tool.name!r}, {shape.arguments[0]!r}: "
            arguments = self._literal(tool, literals_of(self.rules, tool, PYTHON))
            return head, self.rules.sequence(arguments, "}")
        arguments = json_rule(self.rules, tool)
        if isinstance(shape, KeyedCalls):
            return f"{{{quote_json(tool.name)}: ", self.rules.sequence(arguments, "}")
        fields = f'"{shape.name[0]}": {quote_json(tool.name)}, "{shape.arguments[0]}": '
        if not shape.id:
            return "{" + fields, self.rules.sequence(arguments, "}")
        id_ = regex(IDS.get(shape.ids, ID))
        with_id = self.rules.rule(
            self.rules.sequence(f'"{shape.id[0]}": "', id_, f'", {fields}', arguments, "}")
        )
        return "{", either([with_id, self.rules.rule(self.rules.sequence(fields, arguments, "}"))])

    def _expressions(self, shape: PythonCalls) -> CallLayout:
        objects = [(f"{tool.name}(", self._keywords(tool)) for tool in self.tools]
        opening, closing = shape.open[0] if shape.open else "", shape.closing
        lead, end = ("[", "]") if shape.brackets else ("", "")
        further = self._more(self._any(objects, shape.separator))
        return CallLayout(self._ways_of(objects, opening + lead, [further, end + closing]))

    def _keywords(self, tool: ToolSchema) -> Symbol:
        literals = literals_of(self.rules, tool, PYTHON)

        def member(key: str | None, value: Symbol, others: Sequence[str], where: SchemaPlace) -> Symbol:
            if key is None:
                taken = f" & ~{either(map(literal, others))}" if others else ""
                return self.rules.rule(f'{self.rules.terminal(regex(KEYWORD) + taken)} "=" {value}')
            if not key.replace("-", "_").isidentifier():
                where.refuse("has a name that cannot be written as that of a keyword")
            return self.rules.rule(f"{literal(key + '=')} {value}")

        options = literals.schemas.objects(tool.where)
        inside = [literals.members(option.schema, tool.where, member) for option in options]
        ways = [self.rules.rule(f'{body} ")"') for body in inside]
        return self.rules.rule(either(ways))

    # A name and then its arguments

    def _call(self, shape: CallShape, tool: ToolSchema) -> list[GrammarPart]:
        """What stands between the opening of a call and its end."""
        if isinstance(shape, NamedCalls):
            return [*self._name(shape, tool), shape.then[0], json_rule(self.rules, tool)]
        if isinstance(shape, BraceCalls):
            literals = literals_of(self.rules, tool, brace_style(shape.quote))
            return [tool.name, self._literal(tool, literals, ArgumentPlace(tool.declared, tool.declared))]
        assert isinstance(shape, TaggedCalls)
        arguments = Tags(self.rules, shape, tool, self.banned).arguments()
        rest = shape.rest if isinstance(shape, AttributedCalls) else ""
        before, counted, after = rest.partition("{index}")
        count = regex(COUNT) if counted else Symbol("")
        return [tool.name, before, count, after, shape.then[0], arguments or Symbol("")]

    def _name(self, shape: NamedCalls, tool: ToolSchema) -> list[GrammarPart]:
        if shape.prefixed:
            return [f"{shape.prefixed}{tool.name}:", regex(INDEX)]
        if shape.id_first:
            return [regex(IDS["first"]), shape.id_first, tool.name]
        if shape.id_after:
            id_ = self.rules.rule(self.rules.sequence(shape.id_after, regex(IDS.get(shape.ids, ID))))
            return [tool.name, Symbol(f"{id_}?")]
        return [tool.name]

    # Arguments

    def _literal(self, tool: ToolSchema, literals: Literals, place: ArgumentPlace | None = None) -> Symbol:
        options = literals.schemas.objects(tool.where)
        return self.rules.rule(either(literals.option(option, tool.where, place) for option in options))


def literals_of(rules: Rules, tool: ToolSchema, style: LiteralStyle) -> Literals:
    return Literals(rules, Schemas(tool.schema), style, tool.text(rules))


def json_rule(rules: Rules, tool: ToolSchema) -> Symbol:
    """The arguments of a tool as an object of JSON."""
    if tool.lark:
        literals = literals_of(rules, tool, JSON)
        [option] = literals.schemas.objects(tool.where)
        return literals.option(option, tool.where)
    return rules.rule(write_json(tool.native, EXACT))
