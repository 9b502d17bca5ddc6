"""A text in a grammar of Lark, as it is written inside of a call. Begin with productions.py."""
