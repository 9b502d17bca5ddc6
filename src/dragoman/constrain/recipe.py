"""A constraint as plain data, from which another process can make the same one."""

from msgspec import Struct

from dragoman.constrain.constraint import Constraint


class Markers(Struct, frozen=True):
    """What opens reasoning, what ends it, and how its end is written."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    end: str


class BudgetRecipe(Struct, frozen=True):
    markers: Markers
    tokens: int
    starts_in_reasoning: bool


class Recipe(Struct, frozen=True):
    grammar: Constraint | None = None
    budget: BudgetRecipe | None = None
