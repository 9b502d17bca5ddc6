"""Tools in words, for models whose template has no place for them.

The model is told of them in a system message, with the way to call one in the dialect that its answers are
read in. Calls and results of the history are written out in the same way: nothing a client sends is dropped.
"""

from msgspec.json import encode
from msgspec.structs import replace

from dragoman.dialects.declare import Dialect
from dragoman.dialects.render import render
from dragoman.prompt.traits import Traits
from dragoman.types import Answer, Conversation, Message, ToolCall

EXAMPLE = ToolCall(id="call00001", name="NAME", arguments='{"ARGUMENT": "VALUE"}')


def with_tools_in_words(conversation: Conversation, traits: Traits, dialect: Dialect | None) -> Conversation:
    """The conversation as it is, unless it has tools and the template would not show them."""
    if traits.tools or not conversation.tools or dialect is None or not dialect.has_calls or dialect.own:
        return conversation
    messages = tuple(_written_out(message, traits, dialect) for message in conversation.messages)
    told = Message(role="system", content=_description(conversation, dialect))
    return replace(conversation, messages=(told, *messages), tools=())


def _description(conversation: Conversation, dialect: Dialect) -> str:
    functions = "\n".join(encode(tool.get("function", tool)).decode() for tool in conversation.tools)
    example = render(dialect, Answer(calls=[EXAMPLE]))
    return (
        f"You can call these functions; their parameters are JSON Schemas:\n{functions}\n\n"
        f"To call one, write exactly this, with the name and the arguments filled in:\n{example}"
    )


def _written_out(message: Message, traits: Traits, dialect: Dialect) -> Message:
    if message.tool_calls and not traits.calls and isinstance(message.content, str | None):
        answer = Answer(text=message.content or "", calls=list(message.tool_calls))
        return replace(message, content=render(dialect, answer), tool_calls=())
    if message.role == "tool" and not traits.tool_role:
        name = f" of {message.name}" if message.name else ""
        content = message.content if isinstance(message.content, str) else encode(message.content).decode()
        return Message(role="user", content=f"Result{name}:\n{content}")
    return message
