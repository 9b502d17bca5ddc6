"""Built-in chat templates by name, for models with no template or a wrong one.

Most families differ only in the text before and after each message. A `BuiltinTemplate` has this text, and a
template is generated from it. It also has the text that ends an answer: a model without a template often does
not declare it.
"""

import json
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.errors import SettingsError

EOS = "\0"
"""Placeholder for the model's own end-of-text token."""
PLAIN = "plain"
FILES = (".jinja", ".jinja2", ".j2", ".txt")


class BuiltinTemplate(Struct, frozen=True, kw_only=True):
    """Text around the messages of each role."""

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    stop: str = ""
    """Text that ends an answer, in addition to the end-of-text token."""
    inside: bool = False
    """Whether system messages are in the user's turn, before its text."""
    trims: bool = False
    begin: str = ""
    tokens: tuple[str, ...] = ()
    """Control tokens by which the frame of a model without a template is recognised."""

    def source(self, *, bos: bool) -> str:
        """Return a chat template. Unknown roles are treated as the user's."""
        content = "(message.content or '')" + (".strip()" if self.trims else "")
        system, user, answer = (
            f"{_text(before)} ~ {content} ~ {_text(after)}"
            for before, after in (self.system, self.user, self.assistant)
        )
        system_block = "{{ " + system + " }}"
        if self.inside:
            system_block = "{% set ns.system = ns.system ~ " + system + " %}"
            user = f"{_text(self.user[0])} ~ ns.system ~ {content} ~ {_text(self.user[1])}"
        return (
            ("{% set stop_strings = [" + _text(self.stop) + "] %}" if self.stop else "")
            + "{% set ns = namespace(system='') %}"
            + ("{{ bos_token }}" if bos else "")
            + ("{{ " + _text(self.begin) + " }}{% for message in messages %}")
            + ("{% if message.role == 'system' %}" + system_block)
            + ("{% elif message.role == 'assistant' %}{{ " + answer + " }}")
            + ("{% else %}{{ " + user + " }}{% set ns.system = '' %}{% endif %}{% endfor %}")
            + (
                "{% if ns.system %}{{ "
                + f"{_text(self.user[0])} ~ ns.system ~ {_text(self.user[1])}"
                + " }}{% endif %}"
            )
            # A model that must begin with a space does so in a token of its own.
            + ("{% if add_generation_prompt %}{{ " + _text(self.assistant[0].rstrip(" ")) + " }}{% endif %}")
        )


def _text(text: str) -> str:
    """Return a text as a template expression: `"a" ~ eos_token`."""
    return " ~ eos_token ~ ".join(json.dumps(part, ensure_ascii=False) for part in text.split(EOS))


def _by_role(
    before: str, after: str, stop: str = "", *, assistant: str = "assistant", **more: object
) -> BuiltinTemplate:
    """Build a frame in which all roles are written alike: `<|im_start|>ROLE\\n`."""
    system, user, answer = ((before.replace("ROLE", role), after) for role in ("system", "user", assistant))
    return BuiltinTemplate(system=system, user=user, assistant=answer, stop=stop, **more)  # type: ignore[arg-type]


def _mistral(space: str, *, before: str = "", own: bool = False) -> BuiltinTemplate:
    """Build a Mistral frame. `own` means that system messages have markers of their
    own, as in later models.
    """
    system = (f"[SYSTEM_PROMPT]{space}", "[/SYSTEM_PROMPT]") if own else ("", "\n\n")
    tokens = ("[SYSTEM_PROMPT]", "[INST]", "[/INST]") if own else ("[INST]", "[/INST]")
    user = (f"{before}[INST]{space}", f"{before}[/INST]")
    return BuiltinTemplate(system=system, user=user, assistant=(space, EOS), inside=not own, tokens=tokens)


# The order counts when a frame is recognised by its tokens: if one frame's tokens include another's, it comes
# first.
FRAMES: dict[str, BuiltinTemplate] = {
    "phi4": _by_role(
        "<|im_start|>ROLE<|im_sep|>", "<|im_end|>", "<|im_end|>", tokens=("<|im_start|>", "<|im_sep|>")
    ),
    "chatml": _by_role(
        "<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_end|>", tokens=("<|im_start|>", "<|im_end|>")
    ),
    "llama3": _by_role(
        "<|start_header_id|>ROLE<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|eot_id|>",
        trims=True,
        tokens=("<|start_header_id|>", "<|eot_id|>"),
    ),
    "llama4": _by_role(
        "<|header_start|>ROLE<|header_end|>\n\n",
        "<|eot|>",
        "<|eot|>",
        trims=True,
        tokens=("<|header_start|>", "<|eot|>"),
    ),
    "gemma": BuiltinTemplate(
        system=("", "\n\n"),
        user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        assistant=("<start_of_turn>model\n", "<end_of_turn>\n"),
        stop="<end_of_turn>",
        inside=True,
        trims=True,
        tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    "chatglm4": _by_role(
        "<|ROLE|>\n", "", "<|user|>", begin="[gMASK]<sop>", tokens=("[gMASK]", "<sop>", "<|user|>")
    ),
    "phi3": _by_role("<|ROLE|>\n", "<|end|>\n", "<|end|>", tokens=("<|user|>", "<|assistant|>", "<|end|>")),
    "granite": _by_role(
        "<|start_of_role|>ROLE<|end_of_role|>",
        "<|end_of_text|>\n",
        "<|end_of_text|>",
        tokens=("<|start_of_role|>", "<|end_of_role|>"),
    ),
    "command-r": BuiltinTemplate(
        system=("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        user=("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        assistant=("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        stop="<|END_OF_TURN_TOKEN|>",
        trims=True,
        tokens=("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    "deepseek3": BuiltinTemplate(
        system=("", "\n\n"),
        user=("<｜User｜>", ""),
        assistant=("<｜Assistant｜>", EOS),
        tokens=("<｜User｜>", "<｜Assistant｜>"),
    ),
    "exaone3": BuiltinTemplate(
        system=("[|system|]", "[|endofturn|]\n"),
        user=("[|user|]", "\n"),
        assistant=("[|assistant|]", "[|endofturn|]\n"),
        stop="[|endofturn|]",
        trims=True,
        tokens=("[|user|]", "[|endofturn|]"),
    ),
    "mistral-v7-tekken": _mistral("", own=True),
    "mistral-v7": _mistral(" ", own=True),
    "mistral-v3": _mistral(" "),
    "mistral-v3-tekken": _mistral(""),
    "mistral-v1": _mistral(" ", before=" "),
    # The following use plain text, so no token identifies them.
    "llama2": BuiltinTemplate(
        system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
        user=("[INST] ", " [/INST]"),
        assistant=(" ", f" {EOS}<s>"),
        inside=True,
        trims=True,
    ),
    "zephyr": _by_role("<|ROLE|>\n", f"{EOS}\n", "<|user|>"),
    "falcon3": _by_role("<|ROLE|>\n", "\n", "<|user|>"),
    "openchat": BuiltinTemplate(
        system=("", "<|end_of_turn|>"),
        user=("GPT4 Correct User: ", "<|end_of_turn|>"),
        assistant=("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        stop="<|end_of_turn|>",
    ),
    "vicuna": BuiltinTemplate(
        system=("", "\n\n"), user=("USER: ", "\n"), assistant=("ASSISTANT: ", f"{EOS}\n"), stop="\nUSER:"
    ),
    "alpaca": BuiltinTemplate(
        system=("", "\n\n"),
        user=("### Instruction:\n", "\n\n"),
        assistant=("### Response:\n", "\n\n"),
        stop="### Instruction:",
    ),
    "deepseek": BuiltinTemplate(
        system=("", "\n"),
        user=("### Instruction:\n", "\n"),
        assistant=("### Response:\n", "\n<|EOT|>\n"),
        stop="<|EOT|>",
    ),
    "deepseek2": BuiltinTemplate(
        system=("", "\n\n"), user=("User: ", "\n\n"), assistant=("Assistant: ", EOS)
    ),
    "rwkv-world": BuiltinTemplate(
        system=("System: ", "\n\n"),
        user=("User: ", "\n\n"),
        assistant=("Assistant: ", "\n\n"),
        stop="\n\nUser:",
        trims=True,
    ),
    PLAIN: BuiltinTemplate(
        system=("", "\n\n"),
        user=("User: ", "\n"),
        assistant=("Assistant: ", "\n"),
        stop="\nUser:",
        trims=True,
    ),
}


def guess_frame(special: Collection[str]) -> str:
    """Return the name of the frame that matches a model's control tokens, or of the plain one."""
    fits = (
        name for name, frame in FRAMES.items() if frame.tokens and all(t in special for t in frame.tokens)
    )
    return next(fits, PLAIN)


class ChosenTemplate(Struct, frozen=True):
    source: str | None
    """Template text; None for the model's own."""
    how: str
    guessed: bool = False
    """Whether the template is a guess, because none was named."""


def check_template(named: str | None) -> None:
    """Raise if a named file does not exist, before anything is loaded for it."""
    if named is not None and not _is_source(named) and ("/" in named or named.endswith(FILES)):
        _read(Path(named).expanduser())


def choose_template(named: str | None, card: ModelCard, tokenizer: Tokenizer) -> ChosenTemplate:
    """Return the template that a setting names: a file, one of the model's, a built-in one, or template text
    itself.
    """
    if named is None:
        return _usual(card, tokenizer)
    if _is_source(named):
        return ChosenTemplate(named, "the template text of the setting")
    path = Path(named).expanduser()
    if path.is_file():
        return ChosenTemplate(_read(path), f"the template in {path}")
    if named in card.templates:
        return ChosenTemplate(card.templates[named], f"the model's template {named}")
    if named in FRAMES:
        return ChosenTemplate(FRAMES[named].source(bos=tokenizer.add_bos), f"the template {named}")
    check_template(named)
    own = "".join(f"{name}, " for name in card.templates)
    message = (
        f"`chat_template`: {named} is neither a file nor a template; available: {own}{', '.join(FRAMES)}."
    )
    raise SettingsError(message, param="chat_template")


def _usual(card: ModelCard, tokenizer: Tokenizer) -> ChosenTemplate:
    if card.templates:
        return ChosenTemplate(None, "the model's template")
    name = guess_frame(tokenizer.special_ids)
    how = f"the template {name}, because the model has none (set `chat_template` to use another)"
    return ChosenTemplate(FRAMES[name].source(bos=tokenizer.add_bos), how, guessed=True)


def _is_source(named: str) -> bool:
    return "{{" in named or "{%" in named


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"The chat template {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"The chat template {path} is not UTF-8 text.") from error
