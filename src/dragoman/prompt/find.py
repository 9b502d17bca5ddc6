"""Detection of a model's dialect, with the reason in words for the log.

A chat template is the best evidence: a known family is recognised by the markers in its text; an unknown
template is rendered with known answers and analysed (derive.py). A name is weak evidence, and the only one
without a template; each dialect declares parts of its models' names (`stems`).

Rules of the tables of templates:
- the first matching row wins, so a family that borrows another's markers comes before it;
- a marker is text that the model writes or is asked to write, if its family has such text;
- a family is recognised by its turn markers only where its calls look like those of others.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from dragoman.dialects.declarations import Dialect, ReasoningSyntax
from dragoman.dialects.registry import get_dialect, load_dialect, match_name, with_reasoning_of
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.errors import SettingsError
from dragoman.prompt.derive import TemplateAnalysis, examine
from dragoman.settings import Settings


class FoundDialect(Struct, frozen=True):
    """A dialect and how it was found."""

    dialect: Dialect
    how: str

    @property
    def name(self) -> str:
        return self.dialect.name

    def __str__(self) -> str:
        return f"{self.name} ({self.how})"


class TemplateSignature(Struct, frozen=True):
    """Signature of a template: with all of `has` and none of `lacks` it uses `dialect`."""

    dialect: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def fits(self, text: str) -> bool:
        return all(mark in text for mark in self.has) and not any(mark in text for mark in self.lacks)


def find_dialect(
    *,
    template: str | None = None,
    model: str | None = None,
    special_tokens: Collection[str] = (),
    bos_token: str = "",
    eos_token: str = "",
) -> FoundDialect:
    """Detect the dialect of a model; never raises.

    `find_dialect(model="Qwen3-Coder-30B").dialect.name` is "qwen3_coder", and `how` is "the model's name
    contains qwen3-coder". A chat template takes precedence over a name: a known one is recognised by its
    markers, an unknown one is analysed.
    """
    return (
        _by_template(template or "", {"bos_token": bos_token, "eos_token": eos_token}, model)
        or _by_name(model)
        or _by_marks("\0".join(special_tokens), KNOWN, "the model has the tokens")
        or FoundDialect(get_dialect("plain"), "unknown model; text passes through")
    )


def _by_template(source: str, special: dict[str, str], model: str | None) -> FoundDialect | None:
    if not source:
        return None
    marked = _by_marks(source, KNOWN, "the chat template has")
    examined = examine(source, special)
    derived = examined.dialect() if examined is not None else None
    if marked is not None:
        return _check_calls(marked, examined, derived)
    if derived is not None and derived.calls:
        return FoundDialect(derived, "derived from the chat template")
    # A template with only reasoning gives no information about calls; a name may.
    named = _by_name(model)
    if named is not None and named.dialect.calls:
        return named
    reasoning = _by_marks(source, KNOWN_REASONING, "the chat template has")
    if reasoning is not None or derived is None:
        return reasoning
    return FoundDialect(derived, "derived from the chat template")


def _check_calls(
    marked: FoundDialect, examined: TemplateAnalysis | None, derived: Dialect | None
) -> FoundDialect:
    """Check the dialect found by markers: if it cannot parse the calls that the template writes, use the
    derived one.
    """
    if examined is None or derived is None or not derived.calls or not derived.calls[0].open:
        return marked
    if examined.reads(marked.dialect) is not False:
        return marked
    return FoundDialect(derived, f"derived from the chat template; {marked.how}, but it writes other calls")


def _by_marks(text: str, rows: tuple[TemplateSignature, ...], how: str) -> FoundDialect | None:
    row = match_template(text, rows)
    if row is None:
        return None
    return FoundDialect(get_dialect(row.dialect), f"{how} {' and '.join(row.has)}")


def _by_name(model: str | None) -> FoundDialect | None:
    named = match_name(model or "")
    if named is None:
        return None
    return FoundDialect(get_dialect(named[1]), f"the model's name contains {named[0]}")


# Templates of known families

KNOWN: tuple[TemplateSignature, ...] = (
    # Blocks with headers. They come first, because their templates quote the markers of others as examples.
    TemplateSignature("muse_glimmer", ("atem:function_calls",)),
    TemplateSignature("harmony", ("<|channel|>", "<|message|>", "<|start|>")),
    TemplateSignature("solar_open", ("<|tool_call:begin|>",)),
    TemplateSignature("inkling", ("<|content_invoke_tool_json|>",)),
    TemplateSignature("inkling", ("<|message_model|>", "<|content_text|>")),
    TemplateSignature("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>")),
    # DeepSeek. The DSML token is often in a variable, so the word after it is separate in the text.
    TemplateSignature("deepseek_v41", ("｜DSML｜", " calls>"), ("function_calls>", "tool_calls>")),
    TemplateSignature("deepseek_v32", ("｜DSML｜", "function_calls>")),
    TemplateSignature("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    # R1 and its distills do not support tools, and their prompt opens reasoning.
    TemplateSignature(
        "deepseek_r1_template", ("<｜tool▁calls▁begin｜>", "```json", "<｜Assistant｜><think>"), ("tools",)
    ),
    TemplateSignature("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    TemplateSignature("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    TemplateSignature("step3", ("steptml:",)),
    TemplateSignature("step3", ("<｜tool_calls_begin｜>",)),
    # Families with a call marker of their own.
    TemplateSignature("kimi_k2", ("<|tool_calls_section_begin|>",)),
    TemplateSignature("k2_horizon", ("ifm|tool_call",)),
    TemplateSignature("iquest", ("iquest_tool_call",)),
    # Later LongCat models write tagged arguments after the same marker; those are derived.
    TemplateSignature("longcat", ("longcat_tool_call",), ("longcat_arg_key",)),
    TemplateSignature("minimax_m3", ("]<]minimax[>[",)),
    TemplateSignature("minimax_m2", ("minimax:tool_call",)),
    TemplateSignature("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    TemplateSignature("dots", ("dots_function_call",)),
    TemplateSignature("seed_oss", ("seed:tool_call",)),
    TemplateSignature("minicpm5", ('<function name="', '<param name="')),
    TemplateSignature("gemma4", ("<|tool_call>", "<tool_call|>")),
    TemplateSignature("functiongemma", ("<start_function_call>",)),
    TemplateSignature("apertus", ("<|tools_prefix|>",)),
    TemplateSignature("nemotron_v2", ("<TOOLCALL>",)),
    TemplateSignature("internlm", ("<|action_start|>",)),
    TemplateSignature("internlm", ("<|plugin|>",)),
    TemplateSignature("sarashina", ("<|tool_calls|>",)),
    # GigaChat 3.5 has the same turns and other calls.
    TemplateSignature("gigachat3", ("<|role_sep|>", "function_call"), ("gcml", "GCML")),
    TemplateSignature("gigachat3", ("<|role_sep|>", "function call"), ("gcml", "GCML")),
    # LFM2's own templates do not write calls; they write the list of tools.
    TemplateSignature("lfm2", ("<|tool_call_start|>",)),
    TemplateSignature("lfm2", ("<|tool_list_start|>",)),
    TemplateSignature("lfm2", ("List of tools: [", "<|im_start|>")),
    # Cohere. Command 4 is command 3 with other markers around text.
    TemplateSignature("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    TemplateSignature("cohere_command3", ("<|START_ACTION|>",)),
    TemplateSignature("cohere_command3", ("<|START_RESPONSE|>",)),
    TemplateSignature("cohere_command3", ("<|START_THINKING|>",)),
    TemplateSignature("cohere_command_r_plus", ("<|CHATBOT_TOKEN|>", "Action:")),
    # Mistral. [THINK] came with tokenizer 13, [ARGS] with 11.
    TemplateSignature("mistral_v13", ("[TOOL_CALLS]", "[THINK]")),
    TemplateSignature("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    # xLAM borrows Mistral's turns in one of its sizes, and names itself.
    TemplateSignature("xlam", ("xLAM",)),
    TemplateSignature("xlam", ("make calls in a single JSON array",)),
    TemplateSignature("mistral_v3", ("[TOOL_CALLS]",)),
    TemplateSignature("mistral", ("[THINK]",)),
    # One array between <tool_calls> and </tool_calls>: distinguished by the turns around it.
    TemplateSignature("apriel", ("[BEGIN FINAL RESPONSE]",)),
    TemplateSignature("jamba", ("<tool_calls>", "<|bom|>")),
    TemplateSignature("hunyuan_a13b", ("<tool_calls>", "<|extra_0|>")),
    TemplateSignature("hunyuan_a13b", ("<answer>", "<|extra_0|>")),
    TemplateSignature("hunyuan_a13b", ("<answer>", "<｜hy_Assistant｜>")),
    # Tencent's tags may have a suffix that the template keeps in a variable, so they are incomplete here.
    TemplateSignature("hy_v3", ("<tool_sep", "<arg_key")),
    TemplateSignature("hy_v4", ("<arg_key:",)),
    TemplateSignature("hy_v4", ("<tool_calls", "<arg_key", "hy_")),
    # <arg_key> is GLM's; three others use it with turns of their own.
    TemplateSignature("poolside_v1", ("<arg_key>", "<assistant>")),
    TemplateSignature("ling3", ("<arg_key>", "<role>")),
    # Only the later GLM has no newline between the tags.
    TemplateSignature("glm47", ("</arg_key><arg_value>",)),
    TemplateSignature("glm45", ("<arg_key>",)),
    # <function=NAME>. Step and Nemotron use Qwen's calls, with turns and reasoning of their own.
    TemplateSignature("step3p5", ("<function=", "<parameter=", "tool_response\\n")),
    TemplateSignature("step3p5", ("<function=", "<parameter=", "in JSONSchema format")),
    TemplateSignature("nemotron_v3", ("<function=", "<parameter=", "truncate_history_thinking")),
    TemplateSignature("qwen3_coder", ("<function=", "<parameter=")),
    TemplateSignature("functionary_v31", ("<function=", "</function>"), ("<parameter",)),
    TemplateSignature("functionary_v31", ("start_tag => `<function`",)),
    TemplateSignature("functionary_v32", (">>>all",)),
    # IBM. Granite 3 writes a list after its marker, Granite 4 objects between tags.
    TemplateSignature("granite4", ("<tool_call>", "<|start_of_role|>")),
    TemplateSignature("granite", ("<|tool_call|>", "<|start_of_role|>")),
    TemplateSignature("granite", ("available_tools", "<|start_of_role|>")),
    TemplateSignature("granite_20b_fc", ("<|function_call_library|>",)),
    TemplateSignature("granite_20b_fc", ("<function_call> ", "no_function")),
    # functools: the turns distinguish Phi from Firefunction.
    TemplateSignature("firefunction_v2", ("functools", "<|start_header_id|>")),
    TemplateSignature("phi4_mini_json", ("functools",)),
    TemplateSignature("phi4_mini_json", ("<|tool|>", "<|/tool|>"), ("<|/tool_call|>",)),
    # Python calls. Olmo has a marker; the others are recognised by the example in the template.
    TemplateSignature("olmo3", ("<function_calls>",), ("invoke",)),
    TemplateSignature("llama4_pythonic", ("<|header_start|>", "func_name1(")),
    TemplateSignature("pythonic", ("[func_name1(",)),
    # JSON without a marker, in Llama's turns.
    TemplateSignature("llama3_json", ("<|start_header_id|>", '"parameters": ', "ipython")),
    TemplateSignature("llama3_json", ("<|header_start|>", '"parameters": ')),
    # <tool_call> with an object. Two families have turns or reasoning of their own.
    TemplateSignature("reka_edge", ("<tool_call>", "<sep>")),
    TemplateSignature("ernie45", ("<tool_call>", "<response>")),
    TemplateSignature("hermes", ("<tool_call>",)),
)

KNOWN_REASONING: tuple[TemplateSignature, ...] = (
    TemplateSignature("kimi", ("◁think▷",)),
    TemplateSignature("deepseek_r1", ("<think>", "<｜Assistant｜>")),
    TemplateSignature("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    TemplateSignature("qwen3", ("<think>", "</think>")),
)
"""Templates without calls. They are checked last: a name or a derivation may indicate calls."""


def match_template(text: str, rows: tuple[TemplateSignature, ...] = KNOWN) -> TemplateSignature | None:
    """Return the first matching row: `match_template("... <tool_call> ... <arg_key> ...").dialect` is
    "glm45".
    """
    return next((row for row in rows if row.fits(text)), None)


# The dialect of a server: the one in its settings, or the model's.


def check_names(settings: Settings) -> None:
    """Raise if the settings name an unknown dialect, before anything is loaded for it."""
    for name in (settings.dialect, settings.tool_call_parser, settings.reasoning_parser):
        if name not in ("auto", None):
            load_dialect(name)
    tags = (settings.reasoning_open, settings.reasoning_close)
    if tags == (None, None):
        return
    if not all(tag and tag.strip() for tag in tags) or tags[0] == tags[1]:
        message = "`reasoning_open` and `reasoning_close` must be two tags, such as <think> and </think>."
        raise SettingsError(message, param="reasoning_open")
    if settings.reasoning_parser is not None:
        message = "`reasoning_parser` and `reasoning_open` both set the reasoning markers; keep one."
        raise SettingsError(message, param="reasoning_open")


def choose_dialect(
    settings: Settings, card: ModelCard, tokenizer: Tokenizer, template: str | None = None
) -> FoundDialect:
    """Return the dialect of the settings, else the one detected from template, tokens
    and name of the model.
    """
    check_names(settings)
    dialect = _find_named(settings) or find_dialect(
        template=template if template is not None else _usual(card.templates),
        model=card.name,
        special_tokens=tokenizer.special_ids,
        bos_token=_text(tokenizer, tokenizer.bos_id),
        eos_token=_text(tokenizer, tokenizer.eos_id),
    )
    if settings.reasoning_parser is not None:
        other = load_dialect(settings.reasoning_parser)
    elif settings.reasoning_open is not None and settings.reasoning_close is not None:
        other = _with_tags(dialect.dialect, settings.reasoning_open, settings.reasoning_close)
    else:
        return dialect
    return replace(dialect, dialect=with_reasoning_of(dialect.dialect, other))


def _find_named(settings: Settings) -> FoundDialect | None:
    if settings.tool_call_parser is not None:
        return FoundDialect(load_dialect(settings.tool_call_parser), "set as tool_call_parser")
    return (
        None if settings.dialect == "auto" else FoundDialect(load_dialect(settings.dialect), "set as dialect")
    )


def _with_tags(dialect: Dialect, open_: str, close: str) -> Dialect:
    if dialect.channels is not None or dialect.response_template is not None:
        message = (
            f"The dialect {dialect.name} has reasoning in blocks of its own; leave out `reasoning_open`."
        )
        raise SettingsError(message, param="reasoning_open")
    open_, close = open_.strip(), close.strip()
    # On lines of their own, as most models write them; they also match without the whitespace.
    spelled = {"open": (f"{open_}\n",), "close": (f"\n{close}\n\n",)}
    marks = replace(dialect.reasoning or ReasoningSyntax(), **spelled, preface="")
    return Dialect(name=open_, models="", reasoning=marks)


def _usual(templates: Mapping[str, str]) -> str | None:
    """Return the template that would show tools to the model."""
    names = [name for name in ("tool_use", "default") if name in templates] or list(templates)
    return templates[names[0]] if names else None


def _text(tokenizer: Tokenizer, id_: int | None) -> str:
    return "" if id_ is None else tokenizer.pieces[id_].decode("utf-8", "replace")
