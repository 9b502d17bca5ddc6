"""Dialects: how model families write reasoning and tool calls, with parsers and renderers made from them.

`dragoman.list_dialects()` returns them all. Modules:

    declare             the types of a declaration; catalog/ has one per family
    registry            finds a dialect by name, alias or file
    parser              public parsers: text or tokens to events and answers
    compiled            a declaration as marker tables: which markers count in which state
    scan                primitive moves over text that arrives in chunks: read this first
    machine             goes from marker to marker, tries calls, emits events
    readers/            one parser per call syntax; channels parses addressed blocks
    schema              argument types from a tool's schema
    render              the inverse: an answer as its model would write it
    response_template   a dialect declared in a model's own files, with response_reader,
                        response_values and pattern (its regular expressions)
"""
