"""OpenAI's gpt-oss: blocks with a channel, and for calls a recipient."""

from dragoman.dialects.declare import Channels, Dialect

DIALECTS = (
    Dialect(
        name="harmony",
        models="gpt-oss",
        channels=Channels(
            start=("<|start|>assistant", "<|start|>"),
            header=("<|channel|>", "to="),
            body="<|message|>",
            ends=("<|end|>", "<|call|>", "<|return|>"),
            recipient="to=",
            channel="<|channel|>",
            reasoning=frozenset({"analysis"}),
            text=frozenset({"final", "commentary"}),
            call="functions.",
            written=(
                "<|channel|>analysis<|message|>{body}<|end|>",
                "<|channel|>final<|message|>{body}<|end|>",
                "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>",
            ),
        ),
        aliases=("openai", "openai_gptoss", "gpt-oss", "gpt_oss"),
    ),
)
