"""JSON Schema: what is enforced of it, what is refused, and where."""
