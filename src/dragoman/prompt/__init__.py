"""Prompts: chat templates, control tokens, protection of user text, token ids."""

from dragoman.prompt.prompt_builder import PromptBuilder
from dragoman.prompt.template import ChatTemplate
from dragoman.prompt.traits import TemplateTraits

__all__ = ["ChatTemplate", "PromptBuilder", "TemplateTraits"]
