"""Compiles a chat template and renders it as Hugging Face's `apply_chat_template` does."""

from collections.abc import Callable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, TypeAlias

import jinja2

from dragoman.errors import EndlessTemplate, TemplateError
from dragoman.prompt.budget import Budget, Exhausted
from dragoman.prompt.sandbox import BUDGET, SANDBOX, Raised

Clock: TypeAlias = Callable[[], datetime]

MAX_SOURCE = 1024 * 1024


class ChatTemplate:
    """A chat template, ready to render.

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

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for plain data; what the template refuses becomes a TemplateError with its own words."""
        budget = Budget()
        try:
            values = {**self._special, **budget.copy(dict(variables))}
        except RecursionError:
            raise TemplateError("The conversation is nested too deeply.") from None
        context = self._template.new_context(
            {**values, "strftime_now": self._strftime_now, BUDGET: budget}, shared=False
        )
        try:
            return "".join(self._template.root_render_func(context))
        except Raised as raised:
            raise TemplateError(str(raised)) from None
        except Exhausted as exhausted:
            raise EndlessTemplate(f"Rendering was stopped: {exhausted}.") from None
        except Exception as error:
            raise TemplateError(self._describe(error)) from error

    def _strftime_now(self, format: str) -> str:
        return self._clock().strftime(format)

    def _describe(self, error: Exception) -> str:
        line = self._line(error.__traceback__)
        place = f" at its line {line}" if line else ""
        return f"The chat template cannot render this conversation: {type(error).__name__}{place}."

    def _line(self, traceback: TracebackType | None) -> int | None:
        line = None
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == (self._template.filename or "<template>"):
                line = self._template.get_corresponding_lineno(traceback.tb_lineno)
            traceback = traceback.tb_next
        return line


def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise TemplateError(
            f"A chat template has at most {MAX_SOURCE} characters, this one has {len(source)}."
        )
    try:
        return SANDBOX.load(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"The chat template is wrong at line {error.lineno}: {error.message}.") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise TemplateError(f"The chat template cannot be compiled: {type(error).__name__}.") from None
