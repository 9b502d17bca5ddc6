"""How families of models write reasoning and tool calls: declarations, and what is made of them.

`dragoman.list_dialects()` lists them all. To read the room:

    declare             what can be said of a family; catalog/ says it of each
    registry            a family by its name, its alias, or a file
    parser              the way in: text or tokens to events and answers
    compiled            a declaration as tables: which markers matter when, and what they mean
    scan                the moves of reading text that comes in pieces: begin here
    machine             goes from marker to marker, tries calls, says events
    readers/            one way to write calls each; channels reads answers in addressed blocks
    schema              what a tool's schema says of an argument's type
    render              the way back: an answer as its model would write it
    response_template   a dialect that a model's own files declare, with response_reader,
                        response_values and pattern, which runs its regular expressions
"""
