"""dragoman gives any language-model engine a complete, fast, correct OpenAI API, in the engine's own process."""

from dragoman._version import __version__

__all__ = ["__version__"]
