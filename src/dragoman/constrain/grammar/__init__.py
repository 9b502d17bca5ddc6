"""Grammars and expressions of clients as trees, and the Lark that llguidance reads."""
