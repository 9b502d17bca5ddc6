"""Compiles chat templates and renders them as Hugging Face's `apply_chat_template` does.

This is the only module that compiles templates: in jinja2's sandbox, restricted further and metered.
Templates get what Hugging Face gives them: the same whitespace rules, `break` and `continue`, `{% generation
%}`, `tojson`, `raise_exception`, `namespace`, `dict`. In addition to jinja2's own sandbox, only the
attributes in the table below are accessible, and costly operations spend from a budget (see
render_budget.py). A template may change lists and dicts: they are copies, and some templates keep a queue in
one.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType, TracebackType
from typing import Any, NoReturn, TypeAlias

import jinja2
from jinja2 import ext, meta, nodes, runtime
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Cycler, Namespace, _PassArg
from markupsafe import Markup

from dragoman.errors import TEMPLATE_KWARGS, BadRequest, TemplateBudgetExceeded, TemplateError
from dragoman.limits import check_count
from dragoman.prompt.render_budget import (
    CONCAT,
    GROWTH_OF_FILTERS,
    GROWTH_OF_METHODS,
    TAKE,
    TICK,
    BudgetInstrumenter,
    RenderBudget,
    RenderBudgetExceeded,
    check_power,
    percent_size,
    product_size,
    width_of,
)

logger = logging.getLogger("dragoman.prompt")

Clock: TypeAlias = Callable[[], datetime]

MAX_SOURCE = 1024 * 1024


class ChatTemplate:
    """A compiled chat template.

    `ChatTemplate("{{ bos_token }}{{ messages[0].content }}", special={"bos_token": "<s>"})` rendered with
    `messages=[{"role": "user", "content": "hi"}]` gives `<s>hi`.
    """

    def __init__(
        self, source: str, *, special: Mapping[str, str] | None = None, clock: Clock = datetime.now
    ) -> None:
        self.source = source
        self._special = dict(special or {})
        self._clock = clock
        self._template = _compile(source)
        self.tree = SANDBOX.parse(source)
        self.stops = _stop_strings(self.tree, self._special)
        """Stop strings that the template sets."""
        self._asks = meta.find_undeclared_variables(self.tree)
        self._functions_as_text = _adds_functions(self.tree)
        self._always = {**self._template.globals, **self._special}

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with plain data. If the template refuses it, raise a TemplateError with the
        template's text.
        """
        budget = RenderBudget()
        try:
            values = budget.copy({**self._more(variables), **variables})
        except RecursionError:
            raise TemplateError("The conversation is nested too deeply; flatten it.") from None
        # jinja2 calls variables shared if they already include its globals.
        context = self._template.new_context(
            {**self._always, **values, "strftime_now": self._strftime_now, BUDGET: budget}, shared=True
        )
        try:
            return "".join(self._template.root_render_func(context))
        except TemplateRaiseError as raised:
            raise TemplateError(str(raised)) from None
        except RenderBudgetExceeded as exhausted:
            raise TemplateBudgetExceeded(f"Rendering was stopped: {exhausted}.") from None
        except Exception as error:
            raise TemplateError(self._describe(error)) from error
        finally:
            _let_go(context)

    def _more(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return variables that a few templates need, by names that Hugging Face does not define."""
        variables_: dict[str, Any] = {}
        if "functions" in self._asks:
            functions = [tool.get("function", tool) for tool in variables.get("tools") or ()]
            form = json.JSONEncoder(ensure_ascii=False, indent=4)
            text = "".join(_indented(functions, form)) if functions else ""
            variables_["functions"] = text if self._functions_as_text else functions
        if "datetime" in self._asks:
            variables_["datetime"] = self._strftime_now("%Y-%m-%d %H:%M:%S")
        return variables_

    def _strftime_now(self, format: str) -> str:
        return self._clock().strftime(format)

    def _describe(self, error: Exception) -> str:
        line = self._line(error.__traceback__)
        location = f" in line {line}" if line else ""
        return f"The chat template cannot render this conversation: {type(error).__name__}{location}."

    def _line(self, traceback: TracebackType | None) -> int | None:
        line = None
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == (self._template.filename or "<template>"):
                line = self._template.get_corresponding_lineno(traceback.tb_lineno)
            traceback = traceback.tb_next
        return line


def _let_go(context: runtime.Context) -> None:
    """Break the reference cycle of macros and their context, which keeps a copy of the conversation alive."""
    for value in context.vars.values():
        if type(value) is runtime.Macro:
            del value._func
    context.vars.clear()


def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise TemplateError(
            f"The chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed."
        )
    try:
        return SANDBOX.load(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"The chat template has an error in line {error.lineno}: {error.message}."
        ) from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise TemplateError(f"The chat template cannot be compiled: {type(error).__name__}.") from None


def _stop_strings(tree: nodes.Template, special: Mapping[str, str]) -> tuple[str, ...]:
    """Return the texts in `{% set stop_strings = ["###", eos_token] %}`, TabbyAPI's
    syntax for stop strings.
    """
    for node in tree.body:
        if not (isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name)):
            continue
        if node.target.name == "stop_strings":
            items = node.node.items if isinstance(node.node, nodes.List) else [node.node]
            texts = [_text(item, special) for item in items]
            if not all(texts):
                logger.warning(
                    "stop_strings in the chat template: items that are not plain texts are ignored"
                )
            return tuple(text for text in texts if text)
    return ()


def _text(node: nodes.Node, special: Mapping[str, str]) -> str | None:
    if isinstance(node, nodes.Name):
        return special.get(node.name)
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _adds_functions(tree: nodes.Template) -> bool:
    """Whether `functions` is written directly, so that it must be text; otherwise it is a list to iterate
    over.
    """
    writing = tree.find_all((nodes.Add, nodes.Concat, nodes.Output))
    return any(
        isinstance(each, nodes.Name) and each.name == "functions"
        for node in writing
        for each in node.iter_child_nodes()
    )


# The sandbox

BUDGET = " budget"
"""Key of a rendering's budget. The space makes the name unreachable for templates."""

_MAX_JSON_INDENT = 64
_INTERNALS = re.compile(r"__\w+__")
"""Python's own names: no chat template needs one, and every published sandbox escape uses one."""

_UNFIT = {"encode", "format_map", "maketrans", "translate", "fromkeys"}


def _public(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if not name.startswith("_")) - _UNFIT


_CHANGES: dict[type, frozenset[str]] = {
    list: frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}),
    dict: frozenset({"clear", "pop", "popitem", "setdefault", "update"}),
}

_ATTRIBUTES: dict[type, frozenset[str]] = {
    kind: _public(kind) for kind in (str, Markup, list, tuple, dict, runtime.LoopContext, Cycler)
} | {runtime.Macro: frozenset({"name", "arguments", "catch_kwargs", "catch_varargs", "caller"})}


_PLAIN = frozenset({str, list, dict})
_ASCII, _UNICODE = json.JSONEncoder(), json.JSONEncoder(ensure_ascii=False)
_HIDDEN = frozenset({"_block_vars", "_loop_vars"})


class TemplateRaiseError(jinja2.TemplateError):
    """Raised by a template's own `raise_exception`."""


def _raise(message: Any) -> NoReturn:
    raise TemplateRaiseError(str(message))


@jinja2.pass_context
def _tojson(
    context: "_Context",
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON as Hugging Face does: without jinja2's HTML escapes.

    Iterators from `map` and `select` become lists, as in llama.cpp, whose own templates rely on it.
    """
    value = _list_iterator(value)
    if width_of(indent) > _MAX_JSON_INDENT:
        raise RenderBudgetExceeded("the chat template indents too far")
    context.budget.spend(context.budget.weigh(value))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    pieces = []
    for piece in _indented(value, encoder):
        context.budget.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _indented(value: Any, encoder: json.JSONEncoder, newline: str = "\n") -> Iterator[str]:
    """Encode like `encoder.iterencode`, which creates reference cycles of functions."""
    plain = _ASCII if encoder.ensure_ascii else _UNICODE
    if not value or not isinstance(value, (dict, list, tuple)):
        yield plain.encode(value)
        return
    step = encoder.indent if isinstance(encoder.indent, str) else " " * (encoder.indent or 0)
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    is_dict, inner, before = isinstance(value, dict), newline + step, ""
    yield "{" if is_dict else "["
    for key, each in sorted(items) if is_dict and encoder.sort_keys else items:
        # `{"key": 0}`: a key that is not text is converted to one or refused, as usual.
        name = plain.encode({key: 0})[1:-4] + encoder.key_separator if is_dict else ""
        yield before + inner + name
        yield from _indented(each, encoder, inner)
        before = encoder.item_separator
    yield newline + ("}" if is_dict else "]")


class _Namespace(Namespace):
    """jinja2's namespace, without Python's own names, and with a text that does not contain its values."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError("names in a namespace must not start with an underscore")


class _Context(runtime.Context):
    budget: RenderBudget

    def __init__(self, environment: Any, parent: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, parent, *args, **kwargs)
        self.budget = parent[BUDGET]


class _Generation(ext.Extension):
    """`{% generation %}`, which marks the assistant's text for training. Only its body is used here."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateSandbox(SandboxedEnvironment):
    """Sandbox whose templates spend from the budget in their context."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    context_class = _Context

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, ext.loopcontrols],
            finalize=_finalize,
        )
        del self.globals["lipsum"], self.filters["urlize"]
        self.filters["tojson"] = _tojson
        self.filters = {name: _meter(name, each) for name, each in self.filters.items()}
        self.filters |= {TICK: _tick, TAKE: _take, CONCAT: _concat}
        self.globals |= {"raise_exception": _raise, "namespace": _Namespace, "dict": _make_dict}

    def load(self, source: str) -> jinja2.Template:
        tree = self.parse(source)
        for node in tree.find_all(nodes.Node):
            if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
                raise jinja2.TemplateSyntaxError("a chat template cannot load other templates", node.lineno)
            if any(_INTERNALS.search(str(getattr(node, field, ""))) for field in ("attr", "key", "value")):
                raise jinja2.TemplateSyntaxError(
                    "a chat template cannot name Python's internals", node.lineno
                )
        template = self.from_string(BudgetInstrumenter().visit(tree))
        # Jinja keeps them in layers, which each rendering would search.
        template.globals = dict(template.globals)
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _Namespace):
            return not attr.startswith("_")
        allowed = _ATTRIBUTES.get(type(obj)) or (_ATTRIBUTES[tuple] if isinstance(obj, tuple) else ())
        return attr in allowed or (isinstance(obj, tuple) and attr in getattr(obj, "_fields", ()))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        if attribute.startswith("_"):
            raise SecurityError("a chat template cannot reach Python's internals")
        return super().unsafe_undefined(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget: RenderBudget = context.budget
        if operator == "*":
            budget.spend(product_size(left, right, budget.weigh))
        elif operator == "**":
            check_power(left, right)
        elif operator == "%":
            budget.spend(percent_size(left))
        return budget.take(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget: RenderBudget = __context.budget
        # jinja2 adds its own keywords and removes them again.
        own = {key: value for key, value in kwargs.items() if key not in _HIDDEN} if kwargs else kwargs
        if type(__obj) is runtime.Macro:
            # jinja2 does this for every callable in the end; most are macros and methods.
            return budget.take(__obj(__context.eval_ctx, *args, **own))
        name = getattr(__obj, "__name__", "")
        # jinja2 wraps `str.format`.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str) and name in GROWTH_OF_METHODS:
            args = tuple(map(_list_iterator, args))
            budget.spend(GROWTH_OF_METHODS[name](owner, *args, **own))
        if type(__obj) is BuiltinMethodType and type(owner) in _PLAIN:
            result = budget.take(__obj(*args, **own))
        else:
            result = budget.take(super().call(__context, __obj, *args, **kwargs))
        if name in _CHANGES.get(type(owner), ()):
            budget.changed(owner)
        return result


@jinja2.pass_context
def _tick(context: _Context, units: int) -> None:
    context.budget.spend(units)


@jinja2.pass_context
def _take(context: _Context, value: Any) -> Any:
    return context.budget.take(value)


@jinja2.pass_context
def _concat(context: _Context, values: list[Any]) -> Any:
    for each in values:
        context.budget.spend(context.budget.weigh(each))
    join = runtime.markup_join if context.eval_ctx.autoescape else runtime.str_join
    return join(values)


@jinja2.pass_context
def _finalize(context: _Context, value: Any) -> Any:
    context.budget.spend(len(value) if isinstance(value, str) else context.budget.weigh(value))
    return value


def _list_iterator(value: Any) -> Any:
    """Convert iterators to lists, so that they can be measured first."""
    return list(value) if isinstance(value, Iterator) else value


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _meter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it spends before and after, and gets what jinja2 passes to filters."""
    passes = _PassArg.from_obj(function)
    measure = GROWTH_OF_FILTERS.get(name)

    @jinja2.pass_context
    def metered(context: _Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        if measure is not None:
            value = _list_iterator(value)
            budget.spend(measure(value, *args, **kwargs))
        return budget.take(function(*_passed_arguments(passes, context), value, *args, **kwargs))

    return metered


def _passed_arguments(passes: _PassArg | None, context: _Context) -> tuple[Any, ...]:
    if passes is None:
        return ()
    if passes is _PassArg.context:
        return (context,)
    return (context.eval_ctx if passes is _PassArg.eval_context else context.environment,)


SANDBOX = TemplateSandbox()


# Template variables of requests

MAX_KWARGS_DEPTH = 8

# fmt: off
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token",
    "cls_token", "mask_token", "additional_special_tokens", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs",
    "raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum",
    "self", "loop", "caller", "varargs", "kwargs",
})
# fmt: on


def check_kwargs(kwargs: Mapping[str, Any], most: int) -> None:
    """Refuse names of a template's own variables (CVE-2025-62426), and too much data."""
    for name in kwargs:
        if name in RESERVED or name.startswith("_") or not name.isidentifier():
            raise BadRequest(
                f"'{TEMPLATE_KWARGS}' cannot set {name[:64]!r}; use another name.",
                param=TEMPLATE_KWARGS,
                code="invalid_value",
            )
    if kwargs:
        check_count(_size(kwargs, MAX_KWARGS_DEPTH), most, TEMPLATE_KWARGS, "characters of values")


def _size(value: Any, depth: int) -> int:
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, (bool, int, float)):
        return 8
    if depth == 0 or not isinstance(value, (Mapping, list, tuple)):
        raise BadRequest(
            f"'{TEMPLATE_KWARGS}' must be JSON values nested at most {MAX_KWARGS_DEPTH} levels deep.",
            param=TEMPLATE_KWARGS,
            code="invalid_value",
        )
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return sum(_size(each, depth - 1) for each in inner)
