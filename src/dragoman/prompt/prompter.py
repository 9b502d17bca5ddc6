"""From what a client asks to what an engine is given."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dragoman.dialects.declare import Dialect
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.errors import CONVERSATION, FINAL_MESSAGE, TEMPLATE, BadRequest, ContextOverflow, TemplateError
from dragoman.limits import Limits, check_count
from dragoman.prompt.conversation import (
    check_arguments,
    check_kwargs,
    template_variables,
    with_tools_in_words,
)
from dragoman.prompt.encode import Encoder, choose_marks, erase, join_strings, replace_surrogates
from dragoman.prompt.template import ChatTemplate, Clock
from dragoman.prompt.traits import TemplateTraits, detect_traits
from dragoman.types import Conversation, IdsPrompt, Prompt, TextPrompt

_OWN_TEXT = frozenset({"content", "reasoning_content", "reasoning", "thinking"})
"""What an assistant wrote itself; its reasoning markers stay whole there."""


class Prompter:
    """Renders and encodes prompts for one model. It keeps nothing of a request, so threads may share it.

    Chat prompts are what the template writes: no BOS is added to them, as in transformers and vLLM, because a
    template that wants one says so. (llama.cpp adds one even where the template has none.)
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        clock: Clock = datetime.now,
        limits: Limits | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self.most_tokens = min(card.max_model_len - 1, self._limits.prompt_tokens or card.max_model_len)
        """Of a prompt that is to be answered: there must be room for the answer."""
        self._dialect = dialect
        self._encoder = Encoder(tokenizer, max(self._limits.encoded_tokens, card.max_model_len))
        special = {**card.special_tokens, "bos_token": self._encoder.bos, "eos_token": self._encoder.eos}
        self._special = {name: text for name, text in special.items() if text is not None}
        sources = {"default": template} if template is not None else card.templates
        self._templates = {name: self._load(source, clock) for name, source in sources.items()}

    def text(self, conversation: Conversation) -> str:
        """The prompt as text."""
        text, mark = self.render_marked(conversation)
        return erase(text, mark)

    def encode(self, prompt: Prompt, most: int | None = None) -> tuple[int, ...]:
        """The prompt's ids."""
        return self.render(prompt, most)[1]

    def render(self, prompt: Prompt, most: int | None = None) -> tuple[str, tuple[int, ...]]:
        """The prompt as text and as ids. What surely has more than `most` ids is refused unencoded."""
        try:
            return self._render(prompt, most)
        except ContextOverflow as error:
            error.param = error.param or prompt.param
            raise

    def _render(self, prompt: Prompt, most: int | None) -> tuple[str, tuple[int, ...]]:
        if isinstance(prompt, IdsPrompt):
            self._encoder.check_length(prompt.ids, most, prompt.param)
            ids = self._encoder.check_ids(prompt.ids, prompt.param)
            return self._encoder.decode(ids), ids
        if isinstance(prompt, TextPrompt):
            self._check_chars(len(prompt.text) + len(prompt.suffix or ""), prompt.param)
            self._encoder.check_length(prompt.text, most, prompt.param)
            return replace_surrogates(prompt.text), tuple(self._encoder.encode_text(prompt))
        text, mark = self.render_marked(prompt)
        self._encoder.check_length(text, most, prompt.param)
        plain = erase(text, mark)
        # Mostly there is no mark, and none has to be looked for in each piece.
        return plain, tuple(self._encoder.encode_special(text, mark if plain != text else None))

    def encode_special(self, text: str, mark: str | None = None) -> list[int]:
        """Ids of a text in which control tokens count as such, unless a mark stands in them."""
        return self._encoder.encode_special(text, mark)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return self._encoder.decode(ids)

    def traits(self, name: str | None = None) -> TemplateTraits:
        """What a template was found to bear; the usual one if no name is given."""
        return self._choose(name, tools=False)[1]

    def _load(self, source: str, clock: Clock) -> tuple[ChatTemplate, TemplateTraits]:
        if choose_marks(source, 1) != choose_marks("", 1):
            raise TemplateError("A chat template cannot contain Unicode noncharacters.")
        template = ChatTemplate(source, special=self._special, clock=clock)
        return template, detect_traits(source, template.render)

    def _choose(self, name: str | None, *, tools: bool) -> tuple[ChatTemplate, TemplateTraits]:
        if not self._templates:
            raise BadRequest(
                "This model has no chat template: start the server with --chat-template, or use completions.",
                param=CONVERSATION,
            )
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._templates else "default"
            name = name if name in self._templates else next(iter(self._templates))
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise BadRequest(f"There is no chat template {name[:64]!r}; there are: {known}.", param=TEMPLATE)
        return self._templates[name]

    def render_marked(self, conversation: Conversation) -> tuple[str, str]:
        """The prompt as text, with marks in it that keep a client's text apart, and the mark."""
        check_count(len(conversation.messages), self._limits.messages, CONVERSATION, "messages")
        check_arguments(conversation.messages, self._limits)
        template, traits = self._choose(conversation.template, tools=bool(conversation.tools))
        check_kwargs(conversation.template_kwargs, self._limits.template_kwargs_chars)
        given = template_variables(with_tools_in_words(conversation, traits, self._dialect), traits)
        prefix = conversation.response_prefix
        joined = join_strings(prefix, given)
        self._check_chars(len(joined), CONVERSATION)
        marks = choose_marks(joined, 2)
        if len(marks) < 2:
            raise BadRequest("The conversation uses too many Unicode noncharacters.", param=CONVERSATION)
        mark, end = marks
        if not self._encoder.special.harmless(joined):
            given, prefix = self._shield(given, prefix, mark)
        if conversation.continue_final_message:
            _tag_end(given["messages"], end)
        text = template.render(given)
        if conversation.continue_final_message:
            text = _cut_at_tag(text, end)
        return replace_surrogates(self._single_bos(text) + prefix), mark

    def _check_chars(self, count: int, param: str) -> None:
        check_count(count, self._limits.content_chars, param, "characters of content")

    def _shield(self, given: Mapping[str, Any], prefix: str, mark: str) -> tuple[dict[str, Any], str]:
        shield = self._encoder.special.shield
        try:
            made = {name: shield(value, mark) for name, value in given.items() if name != "messages"}
            made["messages"] = [self._shield_message(message, mark) for message in given["messages"]]
        except RecursionError:
            raise BadRequest("The conversation is nested too deeply.", param=CONVERSATION) from None
        return made, shield(prefix, mark)

    def _shield_message(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        own = _OWN_TEXT if message["role"] == "assistant" else ()
        shield = self._encoder.special.shield
        made = {name: shield(value, mark, assistant=name in own) for name, value in message.items()}
        # Roles are ours: some templates write `<|` + role + `|>`.
        return made | {"role": message["role"]}

    def _single_bos(self, text: str) -> str:
        bos = self._encoder.bos
        while bos and text.startswith(bos + bos):
            text = text[len(bos) :]
        return text


def _tag_end(messages: list[dict[str, Any]], end: str) -> None:
    """Mark where the final message ends. The space shows whether the template trims what it writes."""
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = f"{content}{end} "
        return
    for part in reversed(content or []):
        if "text" in part:
            part["text"] = f"{part['text']}{end} "
            return
    raise BadRequest("The final message has no text that could be continued.", param=FINAL_MESSAGE)


def _cut_at_tag(text: str, end: str) -> str:
    """`hi| <end>` becomes `hi`, where `|` is the tag: no end of turn follows a message to be continued."""
    kept, found, rest = text.rpartition(end)
    if not found:
        raise BadRequest("The chat template does not write the final message.", param=FINAL_MESSAGE)
    return kept if rest.startswith(" ") else kept.rstrip()
