"""Whether a prompt has opened reasoning, so that the answer begins inside."""

from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import starts_in_reasoning
from dragoman.types import Conversation


def opened_reasoning(dialect: Dialect, conversation: Conversation, prompt: str) -> bool:
    """Read off what the client began to write for the model, else off the template's last words.

    A prompt that ends with `<think>\\n` has opened it, one that ends with `<think>\\n\\n</think>` has not.
    What users write says nothing.
    """
    begun = _begun(conversation).rstrip()
    if starts_in_reasoning(dialect, begun, continues=True):
        return True
    closes = dialect.reasoning.close if dialect.reasoning else ()
    if any(close.strip() in begun for close in closes):
        return False
    return starts_in_reasoning(dialect, prompt.rstrip().removesuffix(begun))


def _begun(conversation: Conversation) -> str:
    """The answer so far: a final message that is to be continued, and the prefix."""
    content = conversation.messages[-1].content if conversation.continue_final_message else ""
    if isinstance(content, list):
        content = content[-1].get("text", "") if content else ""
    return (content or "") + conversation.response_prefix
