"""Constraints: the required form of an answer, as masks over token ids.

A request states the form as a schema, an expression, a grammar or tool calls. Each becomes a `Constraint`
(constraint.py): a grammar in the Lark that llguidance reads. Started for a `Vocabulary` (vocabulary.py), it
is a matcher, from which an engine gets a mask of the next tokens at each step.

- `schema/`: JSON Schema, checked keyword by keyword and rewritten in keywords that llguidance enforces.
- `grammar/`: grammars and expressions of clients as trees, and a grammar under construction.
- `calls/`: tool calls in a model's own syntax, with arguments in the tools' schemas, and reasoning before
  them.
- `quoted/`: the grammar of a custom tool's text, as the text is written inside a call.

`compile_limits.py` bounds the cost of compiling. Grammars that could compile for minutes are first compiled
in another process (`compile_worker.py`). Compiled constraints are cached (constraint.py).
`reasoning_budget.py` ends reasoning.
"""
