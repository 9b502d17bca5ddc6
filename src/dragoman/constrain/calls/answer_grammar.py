r"""The grammar of a full answer: reasoning, then calls or text, each as the model's dialect writes it.

For an answer that may have reasoning, text and calls of `weather`, it is roughly this Lark:

    start: ("<think>\n" thought)? call* text
    thought[lazy]: FREE "</think>"                         a lazy rule ends as early as possible
    call: led_in "\n{\"name\": \"weather\", \"arguments\": " arguments "}\n</tool_call>"
    led_in[lazy]: text "<tool_call>"                       text and the marker after it are one lexeme
    text: FREE & ~(FREE "<tool_call>" FREE)                text has no opening of a call
    arguments: %json {"type": "object", ...}
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from dragoman.constrain.calls.literal_grammar import JSON, PYTHON, LiteralRules, LiteralStyle, brace_style
from dragoman.constrain.calls.tagged_grammar import TagRules
from dragoman.constrain.calls.tool_schemas import SchemaLocation, SchemaResolver, ToolSchema, read_tools
from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.lark_builder import GrammarPart, LarkBuilder, Symbol, either, literal, regex
from dragoman.constrain.schema.json_schema import EXACT, write_json
from dragoman.dialects.declarations import (
    AttributedCalls,
    BlockCalls,
    BraceCalls,
    Calls,
    CallSyntax,
    Channels,
    Dialect,
    JsonCalls,
    KeyedCalls,
    NamedCalls,
    PythonCalls,
    PythonObjects,
    ReasoningSyntax,
    TaggedCalls,
    TreeCalls,
)
from dragoman.dialects.parser import parse
from dragoman.dialects.render import render
from dragoman.dialects.schema import ArgumentSchema, quote_json
from dragoman.errors import TOOL_CHOICE, TOOLS, BadRequest
from dragoman.types import Answer, ToolCall

# Calls in the model's own syntax, as the renderer writes them, with arguments in their tools' schemas.


ID = "[a-zA-Z0-9_.:-]{1,64}"
IDS = {"mistral": "[a-zA-Z0-9]{9}", "first": "[a-zA-Z0-9]{10}"}
INDEX = "(?:0|[1-9][0-9]{0,2})"
COUNT = "[1-9][0-9]{0,2}"
KEYWORD = "[a-zA-Z_][a-zA-Z0-9_]{0,63}"


class CallAlternative(Struct, frozen=True):
    """Calls that share one opening."""

    head: str
    """Text with which they begin."""
    body: Symbol
    """Everything after `head`."""


class CallLayout(Struct, frozen=True):
    """How the calls of an answer are combined."""

    ways: tuple[CallAlternative, ...]
    between: str | None = None
    """Text between two groups of calls; None if all calls are in one group."""


class CallGrammar:
    """Grammar of the calls of some tools in the syntax of one dialect."""

    def __init__(
        self, rules: LarkBuilder, dialect: Dialect, tools: Sequence[ToolSchema], *, parallel: bool
    ) -> None:
        self.rules = rules
        self.tools = tools
        self.parallel = parallel
        self.banned = "".join(source for source, _ in dialect.replaced)

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
        return CallLayout((CallAlternative(section.open[0] + shape.open[0], body),))

    def _ways(
        self, opening: str, calls: Sequence[Sequence[GrammarPart]], closing: str
    ) -> tuple[CallAlternative, ...]:
        return (CallAlternative(opening, self._one(calls, closing)),)

    def _one(self, calls: Sequence[Sequence[GrammarPart]], closing: str, opening: str = "") -> Symbol:
        """Return a rule for one call of any tool."""
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
    ) -> tuple[CallAlternative, ...]:
        lead, separator, end = ("[", shape.separator, "]")
        if shape.indent:
            lead, separator, end = f"[\n{shape.indent}", f",\n{shape.indent}", "\n]"
        further = more(self._any(objects, separator))
        return self._ways_of(objects, opening + lead, [further, end + closing])

    def _any(self, objects: list[tuple[str, Symbol]], lead: str = "") -> Symbol:
        """Return a rule for one call of any tool. `lead` and the beginning of the call are one lexeme: a
        closing marker that begins with the same character must not hide it.
        """
        return self.rules.rule(either(self.rules.sequence(lead + head, body) for head, body in objects))

    def _ways_of(
        self, objects: list[tuple[str, Symbol]], opening: str, rest: Sequence[GrammarPart]
    ) -> tuple[CallAlternative, ...]:
        if opening.strip() not in ("", "["):
            return (
                CallAlternative(opening, self.rules.rule(self.rules.sequence(self._any(objects), *rest))),
            )
        # Without a marker, the name of a tool distinguishes a call from text.
        return tuple(
            CallAlternative(opening + head, self.rules.rule(self.rules.sequence(body, *rest)))
            for head, body in objects
        )

    def _object(self, shape: JsonCalls, tool: ToolSchema) -> tuple[str, Symbol]:
        """Return the beginning of an object, with the name unless an id may come first, and the rest."""
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

        def member(key: str | None, value: Symbol, others: Sequence[str], where: SchemaLocation) -> Symbol:
            if key is None:
                taken = f" & ~{either(map(literal, others))}" if others else ""
                return self.rules.rule(f'{self.rules.terminal(regex(KEYWORD) + taken)} "=" {value}')
            if not key.replace("-", "_").isidentifier():
                where.refuse("has a name that is not a valid keyword argument")
            return self.rules.rule(f"{literal(key + '=')} {value}")

        options = literals.schemas.objects(tool.where)
        inside = [literals.members(option.schema, tool.where, member) for option in options]
        ways = [self.rules.rule(f'{body} ")"') for body in inside]
        return self.rules.rule(either(ways))

    # A name and then its arguments

    def _call(self, shape: CallSyntax, tool: ToolSchema) -> list[GrammarPart]:
        """Return the parts between the opening of a call and its end."""
        if isinstance(shape, NamedCalls):
            return [*self._name(shape, tool), shape.then[0], json_rule(self.rules, tool)]
        if isinstance(shape, BraceCalls):
            literals = literals_of(self.rules, tool, brace_style(shape.quote))
            return [tool.name, self._literal(tool, literals, ArgumentSchema(tool.declared, tool.declared))]
        assert isinstance(shape, TaggedCalls)
        arguments = TagRules(self.rules, shape, tool, self.banned).arguments()
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

    def _literal(
        self, tool: ToolSchema, literals: LiteralRules, schema: ArgumentSchema | None = None
    ) -> Symbol:
        options = literals.schemas.objects(tool.where)
        return self.rules.rule(either(literals.option(option, tool.where, schema) for option in options))


def literals_of(rules: LarkBuilder, tool: ToolSchema, style: LiteralStyle) -> LiteralRules:
    return LiteralRules(rules, SchemaResolver(tool.schema), style, tool.text(rules))


def json_rule(rules: LarkBuilder, tool: ToolSchema) -> Symbol:
    """Return a rule for the arguments of a tool as a JSON object."""
    if tool.lark:
        literals = literals_of(rules, tool, JSON)
        [option] = literals.schemas.objects(tool.where)
        return literals.option(option, tool.where)
    return rules.rule(write_json(tool.native, EXACT))


CallMode: TypeAlias = Literal["auto", "required", "none"]


def answer_constraint(
    dialect: Dialect,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    choice: CallMode = "required",
    names: Collection[str] | None = None,
    parallel: bool = True,
    strict: Collection[str] | None = None,
    starts_in_reasoning: bool = False,
    text: Constraint | None = None,
    special: Mapping[str, int] | None = None,
    custom: Collection[str] = (),
    pointers: Sequence[str] = (),
) -> Constraint:
    """Build the constraint of a full answer: after its reasoning, calls or text.

    `required` forces calls of the tools with these `names`, or of any; only one without `parallel`. With
    `auto` the model may also write text, and a call that it opens is of a declared tool; `strict` names the
    tools whose calls must then match their schemas, None means all. `text` is the constraint of text.
    `special` are the ids of the model's special tokens: a marker that is one is matched by its id, and
    ordinary text cannot forge it. `custom` names the tools that stand for a custom tool with a text; `places`
    are the params of their schemas.
    """
    answer = AnswerGrammar(dialect, special, starts_in_reasoning=starts_in_reasoning)
    if text is not None and text.watched and choice != "required":
        if choice == "none" and answer.is_plain:
            return text
        message = (
            "'uniqueItems' cannot be enforced in an answer that may have reasoning or calls; leave it out."
        )
        raise BadRequest(message, code="unsupported_schema")
    if choice == "none":
        return Constraint(answer.grammar(answer.wrap_text(text) if text else answer.free_text(())))
    held = strict if choice == "auto" and _holds_any_name(dialect) else None
    chosen = read_tools(tools, names, held, custom, pointers)
    _check(dialect, chosen)
    calls = CallGrammar(answer.rules, dialect, chosen, parallel=parallel)
    if choice == "required":
        return Constraint(answer.grammar(answer.calls(calls)))
    if text is not None:
        if any(_bare(shape) for shape in dialect.calls):
            message = (
                "This model writes calls without a marker, so a schema for the answer cannot be combined "
                "with tools; use one of them."
            )
            raise BadRequest(message, code="unsupported_field")
        return Constraint(answer.grammar(either([answer.calls(calls), answer.wrap_text(text)])))
    return Constraint(answer.grammar(answer.mix_calls(calls)))


def _check(dialect: Dialect, tools: Sequence[ToolSchema]) -> None:
    """Check that every tool can be called by its name in this dialect."""
    if not tools:
        raise BadRequest("No tool can be called; declare at least one.", param=TOOLS, code="invalid_value")
    if dialect.response_template is not None or not dialect.has_calls:
        message = f"Calls cannot be forced in the dialect {dialect.name!r} of this model."
        raise BadRequest(message, param=TOOL_CHOICE, code="unsupported_field")
    for tool in tools:
        call = ToolCall(id=None, name=tool.name, arguments="{}")
        read = parse(render(dialect, Answer(calls=[call])), dialect, [{"name": tool.name}]).calls
        if [parsed.name for parsed in read] != [tool.name]:
            message = (
                f"The name {tool.name!r} cannot be written in this model's call syntax; rename the tool."
            )
            raise BadRequest(message, param=tool.where.beside("name"), code="invalid_value")


def _holds_any_name(dialect: Dialect) -> bool:
    """Whether a call may have a name that is not known beforehand. In a tree of tags it may not, because each
    closing tag repeats the name.
    """
    return not any(isinstance(shape, TreeCalls) for shape in dialect.calls[:1])


def _bare(shape: Calls) -> bool:
    return not shape.open and shape.section is None


class AnswerGrammar:
    def __init__(
        self, dialect: Dialect, special: Mapping[str, int] | None, *, starts_in_reasoning: bool = False
    ) -> None:
        self.dialect = dialect
        self.rules = LarkBuilder(special, "".join(source for source, _ in dialect.replaced))
        self.started = starts_in_reasoning
        self.openings = [mark for shape in dialect.calls for mark in _openings(shape)]
        """Markers that lead into a call; free text must not contain them."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is written before or around text."""
        dialect = self.dialect
        return not (dialect.reasoning or dialect.channels or dialect.text_open)

    def grammar(self, rest: Symbol) -> str:
        """Return the grammar of reasoning followed by the rest."""
        before = self._reasoning()
        return self.rules.grammar(f"{before} {rest}" if before else rest)

    # Reasoning

    def _reasoning(self) -> Symbol | None:
        channels, thinking = self.dialect.channels, self.dialect.reasoning
        if channels is not None:
            return Symbol(f"({self._block(channels, 0)})?") if channels.written[0] else None
        if thinking is None:
            return None
        inside = self._thinking(thinking)
        if self.started:
            return inside
        return Symbol(f"({self.rules.sequence(thinking.open[0], inside)})?")

    def _thinking(self, thinking: ReasoningSyntax) -> Symbol:
        """Return a rule for free text up to any spelling of the end of reasoning, and the layout after it."""
        ends = [end.strip() for end in thinking.close]
        avoided = [mark.strip() for mark in thinking.ended_by] + ends
        if thinking.ended_by_call:
            avoided += self.openings
        trail = thinking.close[0][len(thinking.close[0].rstrip()) :]
        others = {end: self.rules.without(mark for mark in avoided if mark != end) for end in ends}
        ways = [self.rules.text_until(end, others[end]) for end in ends]
        return self.rules.rule(self.rules.sequence(either(ways), trail))

    def _block(self, channels: Channels, kind: int, *, last: bool = False) -> Symbol:
        """Return a rule for a block of free text and the beginning of the next block. The end of the answer
        may end the last block.
        """
        before, _, after = channels.written[kind].partition("{body}")
        outside = self.rules.without([*channels.start, *channels.ends])
        # The block's end marker is one lexeme with the text, whether or not another block follows.
        ended = self.rules.text_until(after or channels.start[0], outside)
        if not last:
            return self.rules.rule(self.rules.sequence(before, ended, channels.start[0] if after else ""))
        text = self.rules.text(outside)
        return self.rules.rule(self.rules.sequence(before, either([ended, text]) if after else text))

    # Calls

    def calls(self, calls: CallGrammar) -> Symbol:
        """Return a rule for one or several calls and nothing else."""
        channels = self.dialect.channels
        if channels is not None:
            block, last = self._call_blocks(channels, calls)
            before = f"({self.rules.sequence(block, channels.start[0])})* " if calls.parallel else ""
            return self.rules.rule(before + last)
        group = calls.group(self.dialect.calls[0])
        call = self.rules.rule(either(self.rules.sequence(way.head, way.body) for way in group.ways))
        if group.between is None:
            return call
        return self.rules.rule(f"{call} ({self.rules.sequence(group.between, call)})*")

    def _call_blocks(self, channels: Channels, calls: CallGrammar) -> tuple[Symbol, Symbol]:
        """Return a rule for a call as a block, and one for the last block, which the end of the answer may
        end.
        """
        blocks, lasts = [], []
        for tool in calls.tools:
            if self.dialect.calls:
                single = CallGrammar(self.rules, self.dialect, [tool], parallel=False)
                group = single.group(self.dialect.calls[0])
                body = self.rules.rule(either(self.rules.sequence(way.head, way.body) for way in group.ways))
            else:
                body = json_rule(self.rules, tool)
            before, _, after = channels.written[2].replace("{name}", tool.name).partition("{body}")
            opened = self.rules.rule(self.rules.sequence(before, body))
            blocks.append(self.rules.sequence(opened, after))
            lasts.append(self.rules.sequence(opened, self._perhaps(after)))
        return self.rules.rule(either(map(self.rules.rule, blocks))), self.rules.rule(
            either(map(self.rules.rule, lasts))
        )

    def _perhaps(self, text: str) -> Symbol:
        return Symbol(f"({self.rules.sequence(text)})?") if text else Symbol("")

    # Text

    def wrap_text(self, text: Constraint) -> Symbol:
        """Return a rule for text in the language of a constraint, with the markers that the dialect writes
        around text.
        """
        inner = self.rules.rule(f"%lark {{\n{text.grammar}\n}}")
        channels = self.dialect.channels
        if channels is None:
            return self.rules.rule(
                self.rules.sequence(self.dialect.text_open, inner, self.dialect.text_close)
            )
        before, _, after = channels.written[1].partition("{body}")
        return self.rules.rule(self.rules.sequence(before, inner, self._perhaps(after)))

    def free_text(self, avoided: Iterable[str]) -> Symbol:
        return self.rules.text(self.rules.without_any(list(avoided)))

    def mix_calls(self, calls: CallGrammar) -> Symbol:
        """Return a rule for text and calls in any order. An opening of a call in text begins a call."""
        channels = self.dialect.channels
        if channels is not None:
            return self._mix_blocks(channels, calls)
        shape = self.dialect.calls[0]
        group = calls.group(shape)
        avoided = [literal(mark) for mark in self.openings if self.rules.is_text(mark)]
        avoided += [regex(pattern) for shape in self.dialect.calls for pattern in _likenesses(shape)]
        silent = self._silent()
        end = self.free_text(avoided)
        ways = self.rules.rule(
            silent + either(self._led_in(way.head, way.body, avoided) for way in group.ways)
        )
        text = self.rules.rule(f"{silent} {end}")
        return self.rules.rule(f"{ways}* {text}" if calls.parallel else f"({ways} | {text})")

    def _silent(self) -> str:
        """Return a pattern for text with special tokens that are dropped, such as those that a model writes
        around text.
        """
        dialect = self.dialect
        marks = [*dialect.drops, dialect.text_open, dialect.text_close]
        marks += [mark for span in dialect.drop_spans for mark in span]
        ids = {piece for mark in marks for piece in self.rules.pieces(mark) if isinstance(piece, int)}
        avoided = [literal(mark) for mark in self.openings if self.rules.is_text(mark)]
        if not ids:
            return ""
        return f"({self.free_text(avoided)} {either(f'<[{id_}]>' for id_ in sorted(ids))})* "

    def _led_in(self, head: str, body: Symbol, avoided: list[Symbol]) -> Symbol:
        """Return a rule for text, then the opening of a call, and the call."""
        core = head.lstrip()
        pieces = self.rules.pieces(core)
        lead = pieces[0] if isinstance(pieces[0], str) else ""
        text = self.free_text(avoided)
        if not lead:
            return self.rules.rule(self.rules.sequence(text, core, body))
        opening = lead.rstrip() if len(lead) == len(core) else lead
        symbol = self.rules.rule(f"{text} {literal(opening)}", lazy=True)
        return self.rules.rule(self.rules.sequence(symbol, core[len(opening) :], body))

    def _mix_blocks(self, channels: Channels, calls: CallGrammar) -> Symbol:
        block, last = self._call_blocks(channels, calls)
        several = [self._block(channels, kind) for kind in (0, 1) if channels.written[kind]]
        if calls.parallel:
            several.append(self.rules.rule(self.rules.sequence(block, channels.start[0])))
        return self.rules.rule(f"{either(several)}* {either([last, self._block(channels, 1, last=True)])}")


def _openings(shape: Calls) -> list[str]:
    section = shape.section
    # If a header may follow the opening of a section, text may as well.
    opening = section.open if section is not None and not isinstance(shape, BlockCalls) else ()
    return [mark.strip() for mark in (*shape.open, *opening)]


def _likenesses(shape: Calls) -> list[str]:
    """Return patterns of what a call without a marker begins with."""
    if not _bare(shape):
        return []
    if isinstance(shape, JsonCalls):
        return [r"""\{\s*["']"""]
    return [r"\[\s*[\w.\-]+\s*\("] if isinstance(shape, PythonCalls) else []
