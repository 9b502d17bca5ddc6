"""Prompts: chat templates, control tokens, protection of user text, token ids."""

from dragoman.prompt.prompter import Prompter
from dragoman.prompt.template import ChatTemplate
from dragoman.prompt.traits import TemplateTraits

__all__ = ["ChatTemplate", "Prompter", "TemplateTraits"]
