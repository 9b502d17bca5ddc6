"""A runaway template stops by itself, soon, and without the memory it asked for."""

import gc
import threading
import time
import tracemalloc

import pytest

from dragoman.errors import TemplateError
from dragoman.prompt import ChatTemplate, render_budget
from dragoman.prompt.render_budget import RenderBudget, RenderBudgetExceeded

GROW = "{% set ns = namespace(x='ab', y=[]) %}{% for i in range(90) %}{% set STEP %}{% endfor %}{{ ns.x }}"

LOOPS = [
    "{% for i in range(10**9) %}a{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(90000) %}{{ range(90000) | list | length }}{% endfor %}",
    "{% for i in range(90000) %}{{ range(90000) | select('odd') | list | length }}{% endfor %}",
    "{% for i in range(90000) %}" + "x" * 5000 + "{% endfor %}",
    "{% macro m() %}" + "x" * 5000 + "{% endmacro %}{% for i in range(90000) %}{% set x = m() %}{% endfor %}",
    "{% set x %}{% for i in range(90000) %}{{ 'a' * 10000 }}{% endfor %}{% endset %}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% for i in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "{% set s = 'a' * 5000000 %}{% for i in range(90000) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "{% set s = 'a' * 5000000 %}{% for i in range(90000) %}{% set t = s[1:] %}{% endfor %}",
]

GIANTS = [
    "{{ 'a' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    GROW.replace("STEP", "ns.x = ns.x ~ ns.x"),
    GROW.replace("STEP", "ns.x = ns.x + ns.x"),
    GROW.replace("STEP", "ns.x = [ns.x, ns.x]"),
    GROW.replace("STEP", "ns.x = (ns.x, ns.x)"),
    GROW.replace("STEP", "ns.x = {'a': ns.x, 'b': ns.x}"),
    GROW.replace("STEP", "ns.x = ns.x.replace('b', 'bb' * 9)"),
    GROW.replace("STEP", "ns.x = ns.x | replace('b', 'bb' * 9)"),
    GROW.replace("STEP", "ns.x = '%s%s' % (ns.x, ns.x)"),
    GROW.replace("STEP", "ns.x = '{0}{0}'.format(ns.x)"),
    GROW.replace("STEP", "ns.x = ns.x.join([ns.x, ns.x, ns.x])"),
    GROW.replace("STEP", "_ = ns.y.append(ns.y)"),
    GROW.replace("STEP", "_ = ns.y.extend([ns.y | list, ns.y | list])"),
    "{% set b = [] %}{% set a = [b] * 90000 %}"
    "{% for i in range(9000) %}{% set _ = b.append('x' * 1000) %}{% endfor %}",
    "{% set ns = namespace(n=3) %}{% for i in range(90) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(width=10**9) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ '1'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ 'x' | indent(width=10**9, first=true) }}",
    "{{ 'x y' | wordwrap(1, wrapstring='a' * 10**7) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    "{{ [[[1]]] | tojson(indent=10**9) }}",
    "{{ range(90000) | map('string') | join('a' * 100000) }}",
    "{{ ('a' * 100000).join(range(90000) | map('string')) }}",
    "{{ ([[1] * 1000] * 90000) | sum(start=[]) | length }}",
]


@pytest.mark.thorough
@pytest.mark.parametrize("source", LOOPS)
def test_loops_stop(source: str) -> None:
    # Nor is it to pay for the garbage of all other tests.
    gc.disable()
    try:
        started = time.thread_time()
        with pytest.raises(TemplateError):
            ChatTemplate(source).render({})
        # Twice the second that it has.
        assert time.thread_time() - started < 2.5
    finally:
        gc.enable()


@pytest.mark.thorough
@pytest.mark.parametrize("source", GIANTS)
def test_giants_are_not_made(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            ChatTemplate(source).render({})
        assert tracemalloc.get_traced_memory()[1] < 300_000_000
    finally:
        tracemalloc.stop()


def test_another_thread_keeps_going() -> None:
    template = ChatTemplate("{{ x }}")
    runaway = ChatTemplate("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}")

    def run() -> None:
        with pytest.raises(TemplateError):
            runaway.render({})

    thread = threading.Thread(target=run)
    thread.start()
    assert all(template.render({"x": "ok"}) == "ok" for _ in range(100))
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_the_largest_conversations_render() -> None:
    """As many messages and characters as the limits let in."""
    each = "{% for m in messages %}{{ m.content.split('x')[-1] | trim ~ m.role }}{% endfor %}"
    template = ChatTemplate(each + "{{ messages | tojson }}")
    assert template.render({"messages": [{"role": "user", "content": "a" * 2000}] * 4096})
    assert template.render({"messages": [{"role": "user", "content": "a" * 8 * 1024 * 1024}]})


def test_going_through_the_messages_for_each_message() -> None:
    source = (
        "{% for m in messages %}{% for n in messages %}{% if m == n %}.{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"number {number} " * 50} for number in range(500)]
    assert ChatTemplate(source).render({"messages": messages}) == "." * 500


@pytest.mark.parametrize(("collections", "ends"), [([5, 5], True), ([5, 6], False), ([5, 6, 7], True)])
def test_collecting_garbage_is_not_the_templates_time(
    monkeypatch: pytest.MonkeyPatch, collections: list[int], ends: bool
) -> None:
    counted = iter(collections)
    monkeypatch.setattr(render_budget, "_count_collections", lambda: next(counted))
    budgeted = RenderBudget()
    try:
        for _ in collections[1:]:
            budgeted._deadline = budgeted._earliest = 0.0
            budgeted.spend(render_budget.LOOK_EVERY * 2)
        ended = False
    except RenderBudgetExceeded:
        ended = True
    assert ended == ends
