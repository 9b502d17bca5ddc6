"""What a request says of reasoning, and to the chat template beside the conversation."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from dragoman.api.fields.shared import SharedFields
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.prompt.conversation import check_kwargs
from dragoman.turns.spec import Thinking

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity: TypeAlias = Literal["low", "medium", "high"]
Budget: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]

BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "reasoning_budget", "thinking_budget")


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None


class ReasoningFields(SharedFields, kw_only=True):
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning_budget: Budget | None = None
    thinking_budget: Budget | None = None

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def thinks(self) -> bool | None:
        """Whether to reason at all, if anything was said about it."""
        said = self.enable_thinking
        if said is None and self.reasoning:
            said = self.reasoning.enabled
        return False if said is None and self.effort == "none" else said


def check_reasoning(fields: ReasoningFields) -> None:
    inner = fields.reasoning or ReasoningOptions()
    both = {
        "reasoning.effort": (inner.effort, fields.reasoning_effort),
        "reasoning.enabled": (inner.enabled, fields.enable_thinking),
    }
    for param, (one, other) in both.items():
        if None not in (one, other) and one != other:
            message = f"'{param}' and its other name say different things; send one of them."
            raise BadRequest(message, param=param, code="invalid_value")
    found = _budgets(fields)
    if len(found) > 1:
        message = f"'{found[1][0]}' and '{found[0][0]}' are the same; send one of them."
        raise BadRequest(message, param=found[1][0], code="invalid_value")


def thinking(fields: ReasoningFields) -> Thinking | None:
    """The budget of tokens; an effort of none is one of 0, where the engine can end reasoning at all."""
    for param, tokens in _budgets(fields):
        return Thinking(tokens=tokens, param=param) if tokens >= 0 else None
    return Thinking(tokens=0, param="reasoning_effort", soft=True) if fields.effort == "none" else None


def _budgets(fields: ReasoningFields) -> list[tuple[str, int]]:
    given = [(name, getattr(fields, name)) for name in BUDGETS]
    if fields.reasoning:
        given.append(("reasoning.max_tokens", fields.reasoning.max_tokens))
    return [(name, tokens) for name, tokens in given if tokens is not None]


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
