"""What is found out about the corpus."""

from typing import Any

import pytest

from dragoman.prompt import ChatTemplate
from dragoman.prompt.traits import detect_traits
from tests.prompt.support import corpus

ALL_ROLES = frozenset({"system", "user", "assistant", "tool"})

FOUND: dict[str, dict[str, Any]] = {
    "chatml": {"developer": False, "system": True, "many_systems": True, "takes_parts": frozenset()},
    "headers": {"raw_arguments": False, "many_systems": True, "short_ids": False},
    "brackets": {"short_ids": True, "many_systems": False, "system": True},
    "turns": {"system": False, "many_systems": False},
    "tagged_tools": {"raw_arguments": False, "null_content": True, "empty_tools": False},
    "parts_only": {"takes_parts": ALL_ROLES, "needs_parts": ALL_ROLES},
    "channels": {"developer": True, "many_systems": False, "thinking_excludes_content": True},
    "queue": {"raw_arguments": True},
}


@pytest.mark.parametrize("name", FOUND)
def test_corpus(name: str) -> None:
    source = corpus(name)
    traits = detect_traits(
        source, ChatTemplate(source, special={"bos_token": "<s>", "eos_token": "</s>"}).render
    )
    assert {key: getattr(traits, key) for key in FOUND[name]} == FOUND[name]


@pytest.mark.parametrize(
    ("arguments", "raw"),
    [
        ("{{ a | tojson }}", False),
        ("{{ a }}", True),
        ("{{ a if a is string else a | tojson }}", True),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", False),
        ("{% if a is mapping %}{{ a | dictsort }}{% else %}{{ a }}{% endif %}", False),
        ("{{ '[' + a + ']' }}", True),
    ],
)
def test_arguments(arguments: str, raw: bool) -> None:
    calls = "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + arguments + "{% endfor %}"
    source = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    assert detect_traits(source, ChatTemplate(source).render).raw_arguments is raw


def test_a_template_that_always_fails() -> None:
    source = "{{ raise_exception('never') }}"
    traits = detect_traits(source, ChatTemplate(source).render)
    assert not traits.system
    assert not traits.short_ids


def test_no_tools_as_an_empty_list() -> None:
    source = "{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}"
    assert detect_traits(source, ChatTemplate(source).render).empty_tools
