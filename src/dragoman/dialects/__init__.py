"""How families of models write reasoning and tool calls: declarations, and what is made of them.

`dragoman.list_dialects()` lists them all.
"""
