"""Templates render as transformers renders them, and as the vectors say."""

import copy
import gc
import json
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import TemplateError
from dragoman.prompt import ChatTemplate
from tests.prompt.support import SHARED, TEMPLATES, clock

VECTORS = SHARED / "vectors" / "templates.jsonl"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OWN = sorted(TEMPLATES.glob("*.jinja"))
OTHERS = sorted((SHARED / "templates").glob("*.jinja"))

# These rows were written down after their templates had changed the list; this is what it was before.
BEFORE = {
    "array.pop() last": ["a", "b", "c"],
    "array.pop() with index": ["a", "b", "c"],
    "array.append()": ["a", "b", "c"],
}

# Lists may be changed here, and what `map` gives is one: transformers refuses both. All else is equal.
BEARS_MORE = {
    "queue.jinja": "SecurityError",
    "Kimi-K2-Instruct.jinja": "SecurityError",
    "llama-cpp-deepseek-r1.jinja": "TypeError",
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <today>, é.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city"},
                    "days": {"type": "integer", "enum": [1, 2]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}},
]
SWITCHES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"thinking": True, "reasoning_effort": "low"},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, reasoning: str | None = None, **more: Any) -> dict[str, Any]:
    keys = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), reasoning) if reasoning else {}
    return {"role": "assistant", "content": content, **keys, **more}


def calling(content: str | None, reasoning: str | None, arguments: Any, calls: int) -> list[dict[str, Any]]:
    ids = ["abc123def", "zyx987wvu"][:calls]
    items = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for id in ids
    ]
    results = [{"role": "tool", "content": "12 °C", "tool_call_id": id, "name": "get_weather"} for id in ids]
    return [user("Rain?"), assistant(content, reasoning, tool_calls=items), *results]


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "plain": ([user("Hello")], None),
    "system": ([SYSTEM, user("Hello é\n")], None),
    "turns": (
        [SYSTEM, user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("d", "w")],
        None,
    ),
    "tools": ([SYSTEM, user("a")], TOOLS),
    "parts": ([user([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])], None),
    "nobody": ([], None),
    "unknown role": ([{"role": "robot", "content": "x"}], None),
    "late system": ([user("a"), assistant("b"), SYSTEM, user("c")], None),
    "developer": ([{"role": "developer", "content": "x"}, user("y")], []),
} | {
    f"call {number}": (calling(*row), TOOLS)
    for number, row in enumerate(
        product(
            (None, "", "So:"), (None, "why"), ({"city": "Zürich", "days": 1}, '{"city": "Paris"}'), (1, 2)
        )
    )
}


def rows() -> list[Any]:
    if not VECTORS.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no {VECTORS}"))]
    lines = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    return [pytest.param(row, id=f"{number}-{row['name']}") for number, row in enumerate(lines)]


@pytest.mark.parametrize("row", rows())
def test_vectors(row: dict[str, Any]) -> None:
    context = row["context"]
    if row["name"] in BEFORE:
        context = {"arr": BEFORE[row["name"]]}
    assert ChatTemplate(row["template"]).render(context) == row["expect"]


def theirs(template: jinja2.Template, variables: dict[str, Any]) -> tuple[str | None, str]:
    try:
        return template.render(**copy.deepcopy(variables), **SPECIAL), ""
    except jinja2.TemplateError as error:
        return None, str(error) if type(error) is jinja2.TemplateError else type(error).__name__
    except Exception as error:
        return None, type(error).__name__


def ours(template: ChatTemplate, variables: dict[str, Any]) -> tuple[str | None, str]:
    try:
        return template.render(variables), ""
    except TemplateError as error:
        return None, error.message


def old(tools: Any) -> dict[str, str]:
    """What one old template asks for, in the way that its makers give it."""
    functions = [tool["function"] for tool in tools or ()]
    text = json.dumps(functions, indent=4, ensure_ascii=False) if functions else ""
    return {"functions": text, "datetime": f"{clock()}"}


@pytest.mark.thorough
@pytest.mark.parametrize("path", [*OWN, *OTHERS], ids=lambda path: path.name)
def test_equal_to_transformers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(utils, "datetime", type("Fixed", (), {"now": staticmethod(clock)}))
    source = path.read_text()
    oracle = utils._cached_compile_jinja_template(source)
    template = ChatTemplate(source, special=SPECIAL, clock=clock)
    switches: list[dict[str, Any]] = [
        {},
        {"enable_thinking": False},
        {"thinking": True, "reasoning_effort": "low"},
    ]
    for (name, (messages, tools)), generate, more in product(CONVERSATIONS.items(), (True, False), switches):
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": generate,
            **more,
        }
        want, refusal = theirs(oracle, {**variables, **old(tools)})
        have, message = ours(template, variables)
        if have is not None and refusal and refusal == BEARS_MORE.get(path.name):
            continue
        assert have == want, name
        assert refusal in message, name


def test_what_a_filter_goes_through_is_written_as_a_list() -> None:
    source = "{{ messages | map(attribute='role') | tojson }}{{ messages | selectattr('a') | tojson }}"
    messages = [{"role": "user"}, {"role": "tool", "a": 1}]
    assert ChatTemplate(source).render({"messages": messages}) == '["user", "tool"][{"role": "tool", "a": 1}]'


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(st.integers() | st.booleans() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)
INDENTS = st.integers(-1, 5) | st.text(max_size=2)
SEPARATORS = st.sampled_from([None, (",", ":"), (" ,", " = ")])


@given(JSON_VALUES, INDENTS, st.booleans(), SEPARATORS)
def test_json_with_an_indent_is_what_python_writes(value: Any, indent: Any, ascii: bool, apart: Any) -> None:
    form = {"indent": indent, "ensure_ascii": ascii, "separators": apart}
    source = "{{ value | tojson(indent=indent, ensure_ascii=ensure_ascii, separators=separators) }}"
    # A template is given lists in the place of tuples, and so are its separators.
    assert ChatTemplate(source).render({"value": value, **form}) == json.dumps(value, **form)


def test_json_with_an_indent_may_be_sorted() -> None:
    value = {"b": {"d": [], "c": {}}, "a": [1]}
    written = ChatTemplate("{{ value | tojson(indent=2, sort_keys=true) }}").render({"value": value})
    assert written == json.dumps(value, indent=2, sort_keys=True)


@pytest.mark.parametrize("path", [*OWN, *OTHERS], ids=lambda path: path.name)
def test_a_rendering_leaves_no_garbage(path: Path) -> None:
    """It would hold a copy of the conversation until Python looks at all objects, which stops everybody."""
    template = ChatTemplate(path.read_text(), special=SPECIAL, clock=clock)
    messages, tools = CONVERSATIONS["call 0"]
    variables = {"messages": [SYSTEM, *messages], "tools": tools, "add_generation_prompt": True}
    ours(template, variables)
    gc.collect()
    gc.disable()
    try:
        ours(template, variables)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_template_s_own_words() -> None:
    template = ChatTemplate("{% if not messages %}{{ raise_exception('Say something.') }}{% endif %}")
    with pytest.raises(TemplateError) as caught:
        template.render({"messages": []})
    assert caught.value.message == "Say something."
    assert caught.value.status == 400


def test_other_failures_name_the_line_and_not_the_data() -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate("a\nb{{ 1 + secret }}").render({"secret": "hunter2"})
    assert "line 2" in caught.value.message
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ x", "{{ x | nothing }}", "{% include 'x' %}", "{{" + "(" * 9000, "x" * 1_100_000],
)
def test_wrong_templates_are_refused_when_loaded(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source)


def test_the_clock_is_given() -> None:
    assert ChatTemplate("{{ strftime_now('%d %B %Y') }}", clock=clock).render({}) == "02 January 2026"


def test_variables_are_not_changed() -> None:
    variables = {"items": [1, {"a": 2}]}
    source = "{% set _ = items.append(3) %}{% set _ = items[1].update(b=4) %}{{ items }}"
    assert ChatTemplate(source).render(variables) == "[1, {'a': 2, 'b': 4}, 3]"
    assert variables == {"items": [1, {"a": 2}]}


def test_subclasses_of_str_lose_their_methods() -> None:
    class Sly(str):
        def run(self) -> str:
            return "ran"

    assert ChatTemplate("{{ x }}{{ x.run is defined }}").render({"x": Sly("hi")}) == "hiFalse"


def test_only_plain_data() -> None:
    with pytest.raises(TypeError):
        ChatTemplate("{{ x }}").render({"x": object()})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for one in functions %}{{ one.name }} {% endfor %}", "get_weather now "),
        ("{{ functions | map(attribute='name') | join(',') }}", "get_weather,now"),
        ("{{ (functions | length) + 1 }}", "3"),
    ],
)
def test_functions_are_given_to_templates_that_go_through_them(source: str, text: str) -> None:
    assert ChatTemplate(source).render({"messages": [], "tools": TOOLS}) == text


@pytest.mark.parametrize(
    "source", ["{{ '\n' + functions }}", "{{ '\n' ~ functions }}", "\n\n{{- functions }}"]
)
def test_functions_are_text_where_a_template_only_writes_them(source: str) -> None:
    text = ChatTemplate(source).render({"messages": [], "tools": TOOLS})
    assert json.loads(text) == [tool["function"] for tool in TOOLS]
    assert ChatTemplate(source).render({"messages": [], "tools": None}).strip() == ""


def test_what_a_client_gives_as_functions_counts() -> None:
    assert ChatTemplate("{{ functions }}").render({"functions": "mine", "tools": TOOLS}) == "mine"


def test_a_template_may_ask_for_the_time() -> None:
    assert ChatTemplate("{{ 'On ' + datetime }}", clock=clock).render({}) == "On 2026-01-02 03:04:05"


@pytest.mark.parametrize(
    ("source", "stops"),
    [
        (
            "{# Metadata #}\n{%- set stop_strings = ['###', '<|user|>', eos_token] -%}",
            ("###", "<|user|>", "</s>"),
        ),
        ("{% set stop_strings = ('a' ~ 'b') %}", ()),
        ("{% set stop_strings = [1, 'x', missing] %}", ("x",)),
        ("{% if tools %}{% set stop_strings = ['x'] %}{% endif %}", ()),
        ("no such list", ()),
    ],
)
def test_stop_strings_of_a_template(source: str, stops: tuple[str, ...]) -> None:
    assert ChatTemplate(source, special=SPECIAL).stops == stops
