"""What a request says to the chat template, beside the conversation."""

from typing import Any, Literal, TypeAlias

from dragoman.api.reasoning_fields import ReasoningFields
from dragoman.limits import Limits
from dragoman.prompt.conversation import check_kwargs

Verbosity: TypeAlias = Literal["low", "medium", "high"]


class TemplateFields(ReasoningFields, kw_only=True):
    chat_template_kwargs: dict[str, Any] | None = None
    template_vars: dict[str, Any] | None = None


def check_template(fields: TemplateFields, limits: Limits) -> None:
    """Also where nothing is rendered with them: what is refused on one route is refused on all."""
    for given in (fields.chat_template_kwargs, fields.template_vars):
        check_kwargs(given or {}, limits.template_kwargs_chars)


def template_kwargs(fields: TemplateFields, verbosity: Verbosity | None) -> dict[str, Any]:
    """The variables of the template; what the client names itself overrules other fields."""
    named = {"enable_thinking": fields.thinks, "reasoning_effort": fields.effort, "verbosity": verbosity}
    given = {name: value for name, value in named.items() if value is not None}
    return {**given, **(fields.template_vars or {}), **(fields.chat_template_kwargs or {})}
