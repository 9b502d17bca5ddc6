"""What an answer must be, as masks over token ids.

A request says it as a schema, an expression, a grammar or calls of tools. Each becomes a `Constraint`
(constraint.py): a grammar in the Lark that llguidance reads. Started for a `Vocabulary` (vocabulary.py) it is
a matcher, which an engine asks at each step what may come next.

- `schema/`: JSON Schema, checked word by word and written in the words that llguidance enforces.
- `grammar/`: grammars and expressions of people, as trees; and a grammar under construction.
- `calls/`: calls in a model's own syntax, with arguments in their tools' schemas, and reasoning before them.
- `quoted/`: the grammar of a custom tool's text, where that text stands inside of a call.

What it may cost is bounded in budget.py. Grammars that could take for ever are tried in another process
first (examiner.py). What was compiled is kept (constraint.py). Reasoning is ended by
reasoning_budget.py.
"""
