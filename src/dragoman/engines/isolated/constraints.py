"""Constraints that are made again from their recipes, in the process of the engine."""

from collections.abc import Callable
from functools import cached_property

from dragoman.constrain.compiling import compile_cached
from dragoman.constrain.reasoning_budget import Budgeted, ReasoningBudget, Recipe
from dragoman.constrain.vocabulary import Vocabulary
from dragoman.engines.protocol import Tokenizer
from dragoman.errors import BadRequest, EngineFailed
from dragoman.types import ConstraintSource, JobConstraint, Matcher


def recipe_of(constraint: JobConstraint | None) -> Recipe | None:
    """How it is made; None where there is nothing to make, because the engine reads its source."""
    if constraint is None or constraint.source is not None:
        return None
    recipe = getattr(constraint, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise BadRequest("This constraint cannot be sent to the engine, which is in another process.")
    return recipe


class Remade:
    source = None

    def __init__(self, start: Callable[[], Matcher]) -> None:
        self.start = start


class Sourced:
    """A constraint that the engine keeps to by itself."""

    def __init__(self, source: ConstraintSource) -> None:
        self.source = source

    def start(self) -> Matcher:
        raise EngineFailed("This constraint is kept to by the engine itself.")


class Kitchen:
    """Makes constraints for one model. Safe to call from worker threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Made at the first use: it takes a while for a large vocabulary."""
        return Vocabulary(self._tokenizer.pieces, self._tokenizer.special, self._tokenizer.end_ids)

    def made(self, recipe: Recipe) -> JobConstraint:
        start = None
        if recipe.grammar is not None:
            start = compile_cached(recipe.grammar, self.vocabulary).copy
        if recipe.budget is not None:
            told = recipe.budget
            budget = ReasoningBudget(
                told.markers, told.tokens, self._tokenizer, starts_in_reasoning=told.starts_in_reasoning
            )
            return Budgeted(budget, start)
        assert start is not None
        return Remade(start)
