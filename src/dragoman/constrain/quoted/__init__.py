"""A text in a Lark grammar, as it is written inside a call. Read productions.py first."""
