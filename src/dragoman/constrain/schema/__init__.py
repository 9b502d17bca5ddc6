"""JSON Schema: which parts are enforced, and which are refused with their location."""
