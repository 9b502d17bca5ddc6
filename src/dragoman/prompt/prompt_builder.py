"""Builds prompts: renders and encodes a conversation.

A conversation becomes the variables of a chat template, in the form that the template supports. If the
template does not support tools, a system message describes them, with the call syntax of the dialect that
parses the answers. Calls and results in the history are written in the same way: nothing a client sends is
dropped.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from msgspec.json import encode
from msgspec.structs import replace

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.render import render
from dragoman.engines.protocol import FallbackTokenizer, ModelCard, Tokenizer, require_tokenizer
from dragoman.errors import (
    CONVERSATION,
    FINAL_MESSAGE,
    TEMPLATE,
    BadRequest,
    ContextOverflow,
    TemplateError,
)
from dragoman.json_size import check_json_size, strip_strings
from dragoman.limits import Limits, check_count
from dragoman.media import MediaKind
from dragoman.prompt.abridged import LEAST_MESSAGES, Rendering
from dragoman.prompt.answer_regions import cut_at_tag, mark_boundaries, tag_end
from dragoman.prompt.encode import (
    ControlTokens,
    MessageChain,
    PromptEncoder,
    ResumeOffsets,
    choose_marks,
    join_strings,
    replace_surrogates,
    strip_mark,
)
from dragoman.prompt.media_placeholders import (
    MediaIdCache,
    MediaPlaceholders,
    Placer,
    chars_of_text,
    detect_media_syntax,
    render_placeholders,
    shielded_runs,
    spell_runs,
)
from dragoman.prompt.prompt_cache import LEAST_KEPT, CachedPrompt, PromptCache
from dragoman.prompt.template import ChatTemplate, Clock, check_kwargs
from dragoman.prompt.traits import MediaSyntax, Messages, TemplateTraits, detect_traits
from dragoman.types import Answer, Conversation, IdsPrompt, Message, Prompt, TextPrompt, ToolCall

# Conversations as template variables


def template_variables(conversation: Conversation, traits: TemplateTraits) -> dict[str, Any]:
    """Return the variables that `apply_chat_template` would pass to the template.

    `Conversation(messages=(Message(role="user", content="hi"),))` gives `{"messages": [{"role": "user",
    "content": "hi"}], "tools": None, ...}`.
    """
    if conversation.continue_final_message and conversation.add_generation_prompt:
        message = f"'{FINAL_MESSAGE}' and 'add_generation_prompt' cannot both be true; set one of them."
        raise BadRequest(message, param=FINAL_MESSAGE)
    return {
        **conversation.template_kwargs,
        "messages": _place_systems(_messages(conversation.messages, traits), traits),
        "tools": list(conversation.tools) or ([] if traits.empty_tools else None),
        "documents": list(conversation.documents) or None,
        "add_generation_prompt": conversation.add_generation_prompt,
    }


def check_arguments(messages: Sequence[Message], limits: Limits) -> None:
    """Limit the JSON in calls' arguments, which are strings of the body: all together must not exceed a
    body's limits.
    """
    texts = [call.arguments for message in messages for call in message.tool_calls]
    if sum(map(len, texts)) > limits.json_lists:
        bare = b",".join(strip_strings(text.encode("utf-8", "surrogatepass")) for text in texts)
        check_json_size(bare, limits, "the calls' arguments", CONVERSATION)


def _messages(messages: Sequence[Message], traits: TemplateTraits) -> Messages:
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_message(message, traits, names) for message in messages]


def _message(message: Message, traits: TemplateTraits, names: Mapping[str | None, str]) -> dict[str, Any]:
    role = _role(message.role, traits)
    fields: dict[str, Any] = {"role": role, "content": _content(message.content, role, traits)}
    name = message.name or (names.get(message.tool_call_id) if role == "tool" else None)
    if name is not None:
        fields["name"] = name
    if message.reasoning is not None:
        fields |= dict.fromkeys(traits.reasoning_keys, message.reasoning)
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, traits) for call in message.tool_calls]
        if traits.thinking_excludes_content and message.reasoning and message.content:
            # The template has one field for both; keep both texts.
            joined = f"{message.reasoning}\n{_join_texts(message.content)}"
            fields |= {"content": "", **dict.fromkeys(traits.reasoning_keys, joined)}
    if message.tool_call_id is not None:
        fields["tool_call_id"] = _call_id(message.tool_call_id, traits)
    return fields


def _role(role: str, traits: TemplateTraits) -> str:
    if role == "function":
        return "tool"
    return "system" if role == "developer" and not traits.developer else role


def _content(content: str | list[dict[str, Any]] | None, role: str, traits: TemplateTraits) -> Any:
    if content is None:
        return None if role == "assistant" and traits.null_content else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if role in traits.needs_parts else content
    return [_part(part) for part in content] if role in traits.takes_parts else _join_texts(content)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Convert a part's text: Chat, Responses and refusals name it differently; templates know one name."""
    text = _text(part)
    return part if text is None else {"type": "text", "text": text}


def _text(part: dict[str, Any]) -> str | None:
    if part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        return text if isinstance(text, str) else None
    if part.get("type") == "refusal":
        return str(part.get("refusal", ""))
    return None


def _join_texts(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(_texts(content))


def _texts(parts: list[dict[str, Any]]) -> Iterator[str]:
    for part in parts:
        text = _text(part)
        if text is None:
            kind = str(part.get("type"))[:64]
            raise BadRequest(f"This model does not support parts of type {kind!r} here.", param=CONVERSATION)
        yield text


def _call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    arguments: Any = call.arguments if traits.raw_arguments else _parse_arguments(call.arguments)
    fields: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    if call.id is not None:
        fields["id"] = _call_id(call.id, traits)
    return fields


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """Parse arguments into an object, because templates iterate over its members; other text is wrapped in
    one.
    """
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}


def _call_id(id: str, traits: TemplateTraits) -> str:
    """Return the call id, or nine letters or digits derived from it if the template requires that."""
    if not traits.short_ids or re.fullmatch(r"[a-zA-Z0-9]{9}", id):
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _place_systems(messages: Messages, traits: TemplateTraits) -> Messages:
    """Move system and developer messages to where the template supports them: none is refused or dropped."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    if not systems or (traits.system and (traits.many_systems or systems == messages[:1])):
        return messages
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    if traits.system:
        role = "system" if any(message["role"] == "system" for message in systems) else "developer"
        return [_merge(role, systems, traits), *rest]
    first = next((index for index, message in enumerate(rest) if message["role"] == "user"), None)
    if first is None:
        return [_merge("user", systems, traits), *rest]
    rest[first] = rest[first] | _merge("user", [*systems, rest[first]], traits)
    return rest


def _merge(role: str, messages: Messages, traits: TemplateTraits) -> dict[str, Any]:
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return {"role": role, "content": _content("\n\n".join(contents), role, traits)}
    lists = [c if isinstance(c, list) else [{"type": "text", "text": c}] for c in contents]
    return {"role": role, "content": _content([part for parts in lists for part in parts], role, traits)}


# Tools described in a message

EXAMPLE = ToolCall(id="call00001", name="NAME", arguments='{"ARGUMENT": "VALUE"}')


def with_tools_in_words(
    conversation: Conversation, traits: TemplateTraits, dialect: Dialect | None
) -> Conversation:
    """Return the conversation unchanged, unless it has tools that the template would not show."""
    if (
        traits.tools
        or not conversation.tools
        or dialect is None
        or not dialect.has_calls
        or dialect.response_template
    ):
        return conversation
    messages = tuple(_write_out(message, traits, dialect) for message in conversation.messages)
    description = Message(role="system", content=_description(conversation, dialect))
    return replace(conversation, messages=(description, *messages), tools=())


def _description(conversation: Conversation, dialect: Dialect) -> str:
    functions = "\n".join(encode(tool.get("function", tool)).decode() for tool in conversation.tools)
    example = render(dialect, Answer(calls=[EXAMPLE]))
    return (
        f"You can call these functions; their parameters are JSON Schemas:\n{functions}\n\n"
        f"To call one, write exactly this, with the name and the arguments filled in:\n{example}"
    )


def _write_out(message: Message, traits: TemplateTraits, dialect: Dialect) -> Message:
    if message.tool_calls and not traits.calls and isinstance(message.content, str | None):
        answer = Answer(text=message.content or "", calls=list(message.tool_calls))
        return replace(message, content=render(dialect, answer), tool_calls=())
    if message.role == "tool" and not traits.tool_role:
        name = f" of {message.name}" if message.name else ""
        content = message.content if isinstance(message.content, str) else encode(message.content).decode()
        return Message(role="user", content=f"Result{name}:\n{content}")
    return message


# The prompt builder


_OWN_TEXT = frozenset({"content", "reasoning_content", "reasoning", "thinking"})
"""Fields that an assistant wrote itself; their reasoning markers stay unbroken."""


class PromptBuilder:
    """Renders and encodes prompts for one model. It keeps no state of requests, so threads may share it.

    Chat prompts are exactly what the template writes: no BOS is added, as in transformers and vLLM, because a
    template that needs one writes it. (llama.cpp adds one even if the template does not.)
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
        placer: Placer | None = None,
    ) -> None:
        """`place` is the engine's, for models that take images or audio."""
        self._limits = limits or Limits()
        self.most_tokens = min(card.context_tokens - 1, self._limits.prompt_tokens or card.context_tokens)
        """Maximum number of tokens of a prompt to be answered: it leaves space for the answer."""
        self._dialect = dialect
        self._card = card
        sources = {"default": template} if template is not None else card.templates
        if isinstance(tokenizer, FallbackTokenizer):
            tokenizer.read_templates(sources.values())
        self._encoder = PromptEncoder(tokenizer, max(self._limits.encoded_tokens, card.max_model_len or 0))
        self.share, self.margin = self._encoder.share, self._encoder.special.longest
        own = {"bos_token": self._encoder.bos, "eos_token": self._encoder.eos}
        known = {name: text for name, text in own.items() if text is not None}
        self.special = {**own, **card.special_tokens, **known}
        """Texts that templates know by name; None if the model has no such token."""
        self._special = {name: text for name, text in self.special.items() if text is not None}
        self.source = sources.get("default")
        """Source of the default template."""
        self._templates = {name: self._load(source, clock) for name, source in sources.items()}
        self._media_ids = MediaIdCache(placer, self.share) if placer else None
        self._shielded = self._encoder.special
        if card.modalities:
            runs = shielded_runs(card.modalities, (traits for _, traits in self._templates.values()))
            self._shielded = ControlTokens({**tokenizer.special_ids, **dict.fromkeys(runs, -1)})

    def text(self, conversation: Conversation) -> str:
        """Return the prompt as text."""
        rendering = self._rendering(conversation)
        return self.display_text(strip_mark(rendering.text, rendering.mark), conversation)

    def encode(self, prompt: Prompt, most: int | None = None) -> tuple[int, ...]:
        """Return the prompt's ids."""
        return self.render(prompt, most)[1]

    def render(
        self,
        prompt: Prompt,
        most: int | None = None,
        known: CachedPrompt | None = None,
        filling: MediaPlaceholders | None = None,
    ) -> tuple[str, tuple[int, ...]]:
        """Return the prompt as text and as ids. A prompt with certainly more than `most` ids is refused
        unencoded.

        `known` is the prompt as found by `find_or_render`; `filling` collects the spans of its media.
        """
        try:
            return self._render(prompt, most, known, filling)
        except ContextOverflow as error:
            error.param = error.param or prompt.param
            raise

    def _render(
        self, prompt: Prompt, most: int | None, known: CachedPrompt | None, filling: MediaPlaceholders | None
    ) -> tuple[str, tuple[int, ...]]:
        if isinstance(prompt, IdsPrompt):
            require_tokenizer(self._card, "a prompt of ids", prompt.param)
            self._encoder.check_length(prompt.ids, most, prompt.param)
            ids = self._encoder.check_ids(prompt.ids, prompt.param)
            return self._encoder.decode(ids), ids
        if isinstance(prompt, TextPrompt):
            self._check_chars(len(prompt.text) + len(prompt.suffix or ""), prompt.param)
            self._encoder.check_length(len(prompt.text), most, prompt.param)
            return replace_surrogates(prompt.text), tuple(self._encoder.encode_text(prompt))
        rendering = known.rendering if known else self._rendering(prompt)
        text, mark = rendering.text, rendering.mark
        filling = filling or self.filling(prompt)
        self._encoder.check_length(chars_of_text(text) if filling else len(text), most, prompt.param)
        # Usually there are no marks, and then none are searched for in each chunk.
        shown = self.engine_text(text, mark)
        before = known.encoded if known else None
        encoded = self._encoder.encode_on_from(text, mark if shown != text else None, before, filling)
        if known:
            known.encoded = encoded
        return shown, encoded.ids

    def engine_text(self, text: str, mark: str, plain: str | None = None) -> str:
        """Return a rendered text without marks, as the engine gets it; `plain` is the text without marks if
        known.
        """
        plain = strip_mark(text, mark) if plain is None else plain
        apart = self._card.wants_prompt_text and plain != text
        return self._shielded.keep_apart(text, mark) if apart else plain

    def display_text(self, text: str, prompt: Prompt) -> str:
        """Return a prompt's text for display: media placeholders become what the template writes for them."""
        if not isinstance(prompt, Conversation) or not prompt.media:
            return text
        return spell_runs(text, prompt.media.values(), self._forms(prompt))

    def filling(self, conversation: Conversation) -> MediaPlaceholders | None:
        """Return the placeholders of a prompt with media, or None."""
        if not conversation.media or self._media_ids is None:
            return None
        runs = {kind: self.encode_special(form.run) for kind, form in self._forms(conversation).items()}
        return MediaPlaceholders(conversation, self._media_ids, runs, self.controls)

    def _forms(self, conversation: Conversation) -> Mapping[MediaKind, MediaSyntax]:
        return self._choose(conversation.template, tools=bool(conversation.tools))[1].media

    def encode_special(
        self, text: str, mark: str | None = None, *, begins: bool = True, borders: ResumeOffsets | None = None
    ) -> list[int]:
        """Encode a text in which control tokens count as such, unless they contain a mark."""
        return self._encoder.encode_special(text, mark, begins=begins, borders=borders)

    def split_special(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Split a text: yield control tokens with their ids, and text between them with None."""
        return self._encoder.special.split(text)

    @property
    def controls(self) -> Mapping[int, str]:
        """Control tokens that can occur in a prompt as text."""
        return self._encoder.special.texts

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens included."""
        return self._encoder.decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id."""
        return self._encoder.pieces(ids)

    def traits(self, name: str | None = None) -> TemplateTraits:
        """Return the traits of a template; of the default one without a name."""
        return self._choose(name, tools=False)[1]

    def stops(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the stop strings that the template sets for this prompt."""
        if not isinstance(prompt, Conversation):
            return ()
        return self._choose(prompt.template, tools=bool(prompt.tools))[0].stops

    def _load(self, source: str, clock: Clock) -> tuple[ChatTemplate, TemplateTraits]:
        if choose_marks(source, 1) != choose_marks("", 1):
            raise TemplateError("The chat template contains Unicode noncharacters; remove them.")
        template = ChatTemplate(source, special=self._special, clock=clock)
        if len(template.stops) > self._limits.stops:
            raise TemplateError(
                f"The chat template has {len(template.stops)} stop strings; "
                f"at most {self._limits.stops} are allowed."
            )
        traits = detect_traits(source, template.render)
        if self._card.modalities:
            traits = replace(traits, media=detect_media_syntax(template.render, self._card.modalities))
        return template, traits

    def _choose(self, name: str | None, *, tools: bool) -> tuple[ChatTemplate, TemplateTraits]:
        if not self._templates:
            raise BadRequest(
                "This model has no chat template; start the server with --chat-template, or use completions.",
                param=CONVERSATION,
            )
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._templates else "default"
            name = name if name in self._templates else next(iter(self._templates))
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise BadRequest(f"Unknown chat template {name[:64]!r}; available: {known}.", param=TEMPLATE)
        return self._templates[name]

    def find_or_render(self, conversation: Conversation, known: PromptCache, owner: str) -> CachedPrompt:
        """Find a cached prompt of the conversation, or render it, at the cost of its new messages."""
        if len(conversation.messages) < LEAST_MESSAGES:
            rendering = self._rendering(conversation)
            if len(rendering.text) >= LEAST_KEPT:
                return known.keep(conversation, owner, rendering)
            return CachedPrompt(conversation, rendering, {}, MessageChain())
        self._check_messages(conversation)
        template, _ = self._choose(conversation.template, tools=bool(conversation.tools))
        prompt = known.render(conversation, owner, self._rendering, template.tree)
        self._check_chars(prompt.rendering.chars, CONVERSATION)
        return prompt

    def render_fenced(self, known: CachedPrompt, careful: bool) -> Rendering:
        """Render the same conversation with other marks, before and after texts that the
        model did not write.
        """
        return known.fence(careful, partial(self._rendering, careful=careful)).rendering

    def _check_messages(self, conversation: Conversation) -> None:
        check_count(len(conversation.messages), self._limits.messages, CONVERSATION, "messages")
        check_arguments(conversation.messages, self._limits)

    def _rendering(self, conversation: Conversation, careful: bool | None = None) -> Rendering:
        """Render the prompt as text, with marks that protect a client's text and with media placeholders.

        If `careful` is set, fences replace these marks, set carefully or not.
        """
        self._check_messages(conversation)
        if not conversation.media:
            return self._write(conversation, careful)
        forms, write = self._forms(conversation), partial(self._write, careful=careful)
        return render_placeholders(conversation, forms, self._card.modalities, write)

    def _write(self, conversation: Conversation, careful: bool | None) -> Rendering:
        template, traits = self._choose(conversation.template, tools=bool(conversation.tools))
        check_kwargs(conversation.template_kwargs, self._limits.template_kwargs_chars)
        fields = template_variables(with_tools_in_words(conversation, traits, self._dialect), traits)
        prefix = conversation.response_prefix
        joined = join_strings(prefix, fields)
        self._check_chars(len(joined), CONVERSATION)
        mark, end, fence = _choose_three(joined)
        if not self._shielded.is_harmless(joined):
            fields, prefix = self._shield(fields, prefix, mark)
        order = () if careful is None else mark_boundaries(fields["messages"], fence, careful=careful)
        if conversation.continue_final_message:
            tag_end(fields["messages"], end)
        text = template.render(fields)
        if conversation.continue_final_message:
            text = cut_at_tag(text, end)
        text = replace_surrogates(self._single_bos(text) + prefix)
        return Rendering(text, mark if careful is None else fence, len(joined), order)

    def _check_chars(self, count: int, param: str) -> None:
        check_count(count, self._limits.content_chars, param, "characters of content")

    def _shield(self, fields: Mapping[str, Any], prefix: str, mark: str) -> tuple[dict[str, Any], str]:
        shield = self._shielded.break_control_tokens
        try:
            mapping = {name: shield(value, mark) for name, value in fields.items() if name != "messages"}
            mapping["messages"] = [self._shield_message(message, mark) for message in fields["messages"]]
        except RecursionError:
            raise BadRequest(
                "The conversation is nested too deeply; flatten it.", param=CONVERSATION
            ) from None
        return mapping, shield(prefix, mark)

    def _shield_message(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        own = _OWN_TEXT if message["role"] == "assistant" else ()
        shield = self._shielded.break_control_tokens
        fields = {name: shield(value, mark, assistant=name in own) for name, value in message.items()}
        # Roles are not client text: some templates write `<|` + role + `|>`.
        return fields | {"role": message["role"]}

    def _single_bos(self, text: str) -> str:
        bos = self._encoder.bos
        while bos and text.startswith(bos + bos):
            text = text[len(bos) :]
        return text


def _choose_three(joined: str) -> list[str]:
    if len(marks := choose_marks(joined, 3)) < 3:
        raise BadRequest(
            "The conversation uses too many different Unicode noncharacters; remove some.", param=CONVERSATION
        )
    return marks
