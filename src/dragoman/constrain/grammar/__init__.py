"""Grammars and expressions that people write, as trees; and the Lark that llguidance reads."""
