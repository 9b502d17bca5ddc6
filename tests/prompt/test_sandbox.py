"""Published escapes, as model templates: CVE-2024-34359, -2024-56326, -2025-27516 and their kin."""

import pytest

from dragoman.errors import TemplateError
from dragoman.prompt import ChatTemplate

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ (range | attr('__class__')).__base__ }}",
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__init__}'.format_map({'x': messages}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__}'] | map('format', messages) | list }}",
    "{% for x in [].__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ dict.__mro__ }}",
    "{{ loop.__class__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__ }}",
    "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "{{ ''.encode().hex() }}",
    # Names that are only put together while it runs.
    "{{ messages['__cl' ~ 'ass__'] }}",
    "{{ messages | attr('__cl' ~ 'ass__') }}",
    "{{ messages | map(attribute='__cl' ~ 'ass__') | list }}",
    "{{ ('{0.__cl' ~ 'ass__}').format(messages) }}",
    "{% set ns = namespace() %}{% set ns['__cl' ~ 'ass__'] = 1 %}",
    "{{ messages | attr('_' ~ '_init_' ~ '_') }}",
    "{{ raise_exception | attr('__glo' ~ 'bals__') }}",
    "{{ namespace('__cl' ~ 'ass__') }}",
    "{{ namespace({'__cl' ~ 'ass__': 1}) }}",
    "{{ range.mro() }}",
    "{{ namespace.mro() }}",
    "{{ messages.items.im_func() }}",
    "{{ ('' | attr('format')).im_self.x }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_errors(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render({"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("source", ESCAPES[:20])
def test_most_are_refused_when_loaded(source: str) -> None:
    if "__" in source:
        with pytest.raises(TemplateError):
            ChatTemplate(source)


@pytest.mark.parametrize("source", ["{{ ' tick' }}", "{{ x | default(1) }}", "{{ '__init__.py is a file' }}"])
def test_what_looks_alike(source: str) -> None:
    """Only the last is refused: it is not worth a hole to write that word."""
    if "__" in source:
        with pytest.raises(TemplateError):
            ChatTemplate(source)
    else:
        assert ChatTemplate(source).render({})


def test_the_budget_is_out_of_reach() -> None:
    source = "{{ ' budget' in self | string }}{{ budget is defined }}"
    assert ChatTemplate(source).render({}).endswith("False")
