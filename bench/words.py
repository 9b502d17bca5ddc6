"""What the servers without a model say: words as long as tokens are, some with characters JSON escapes."""

WORDS = (
    " the",
    " answer",
    " is",
    " forty",
    "-two",
    ",",
    "\n",
    " “so",
    "”",
    " it",
    ' "says"',
    " über",
    " all",
    ".",
)


def text(tokens: int) -> str:
    """The whole answer of so many tokens: what every client must have received in the end."""
    return "".join(WORDS[number % len(WORDS)] for number in range(tokens))
