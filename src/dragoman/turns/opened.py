"""Whether a prompt has opened reasoning, so that the answer begins inside."""

from collections.abc import Sequence

from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import starts_in_reasoning
from dragoman.engines.protocol import Tokenizer
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


def ids_opened_reasoning(dialect: Dialect, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """The same for a prompt of ids, which may end in the middle of an answer.

    An answer begins after a control token; what stands before the last of them says nothing. Without any but
    the first id of a text, nobody can tell where messages end: then only the end of the prompt counts.
    """
    thinking = dialect.reasoning
    if thinking is None:
        return False
    markers = {spelling.strip() for spelling in (*thinking.open, *thinking.close)}
    frame = {id_ for text, id_ in tokenizer.special.items() if text not in markers} - {tokenizer.bos_id}
    start = next((place for place in range(len(prompt), 0, -1) if prompt[place - 1] in frame), 0)
    text = b"".join(tokenizer.pieces[id_] for id_ in prompt[start:]).decode("utf-8", "replace")
    return starts_in_reasoning(dialect, text, continues=start > 0)


def _begun(conversation: Conversation) -> str:
    """The answer so far: a final message that is to be continued, and the prefix."""
    content = conversation.messages[-1].content if conversation.continue_final_message else ""
    if isinstance(content, list):
        content = content[-1].get("text", "") if content else ""
    return (content or "") + conversation.response_prefix
