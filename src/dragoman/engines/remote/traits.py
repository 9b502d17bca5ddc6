"""What a server can do that is to be an upstream: seen once, by asking it for one token."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from dragoman.client import AsyncClient, ClientError, Refused
from dragoman.engines.protocol import UNSUPPORTABLE, Tokenizer
from dragoman.errors import SettingsError
from dragoman.types import SourceForm

Server: TypeAlias = Literal["dragoman", "vllm", "other"]
_SAMPLE = "The quick brown fox, 12 + 30 = 42: naïve Grüße!\n"
_STANDARD = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "logprobs"}
)
"""What every server of this API takes."""
_UNSUPPORTED: Mapping[Server, frozenset[str]] = {
    # The first cannot be streamed; the second are ids here, and the API has only texts for them.
    "dragoman": frozenset({"prompt_logprobs", "bad_words"}),
    "vllm": frozenset({"prompt_logprobs", "bad_words", "typical_p", "reuse_prefix"}),
    "other": frozenset(UNSUPPORTABLE) - _STANDARD,
}
_SOURCES: Mapping[Server, tuple[SourceForm, ...]] = {
    "dragoman": ("json_schema", "regex", "choice", "gbnf", "lark"),
    # What its usual choice of a backend reads.
    "vllm": ("json_schema", "regex", "choice", "gbnf", "structural_tag"),
    "other": (),
}


class BadUpstream(SettingsError):
    """A server that cannot be used as one."""


class Traits(Struct, frozen=True, kw_only=True):
    server: Server
    model: str
    max_model_len: int | None
    adapters: tuple[str, ...] = ()
    takes_ids: bool
    gives_ids: bool

    @property
    def unsupported(self) -> frozenset[str]:
        return _UNSUPPORTED[self.server]

    @property
    def sources(self) -> tuple[SourceForm, ...]:
        return _SOURCES[self.server]

    def like(self, other: "Traits") -> bool:
        """Whether a job of the one can be given to the other."""
        mine, theirs = ((t.server, t.model, t.takes_ids, t.gives_ids) for t in (self, other))
        return mine == theirs


async def look(client: AsyncClient, tokenizer: Tokenizer, model: str | None) -> Traits:
    """Raises ClientError where nobody answers, and BadUpstream where the server will not do."""
    models = await client.models()
    chosen = _chosen(models, model)
    await _check_tokenizer(client, tokenizer, chosen["id"])
    takes, gives = await _ids(client, tokenizer, chosen["id"])
    owner = chosen.get("owned_by")
    return Traits(
        server="dragoman" if owner == "dragoman" else "vllm" if owner == "vllm" and gives else "other",
        model=chosen["id"],
        max_model_len=_length(chosen),
        adapters=tuple(one["id"] for one in models if one.get("parent") == chosen["id"]),
        takes_ids=takes,
        gives_ids=gives,
    )


def _chosen(models: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    found = next((one for one in models if name is None or one["id"] == name), None)
    if found is None:
        known = ", ".join(one["id"] for one in models) or "none"
        raise BadUpstream(f"It has no model {name or ''}; there is: {known}.")
    return found


def _length(model: dict[str, Any]) -> int | None:
    """Under the name that most have for it, or under llama-server's."""
    meta = model.get("meta")
    told = model.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    return told if isinstance(told, int) else None


async def _check_tokenizer(client: AsyncClient, tokenizer: Tokenizer, model: str) -> None:
    """Where the server can be asked: with another vocabulary, everything would be nonsense."""
    body = {"model": model, "prompt": _SAMPLE, "add_special_tokens": False}
    try:
        reply = await client.request("POST", "/tokenize", body)
    except ClientError:
        return
    theirs = reply.body.get("tokens") if isinstance(reply.body, dict) else None
    if theirs and theirs != tokenizer.encode(_SAMPLE):
        raise BadUpstream("It has another tokenizer; give its own with --tokenizer.")


async def _ids(client: AsyncClient, tokenizer: Tokenizer, model: str) -> tuple[bool, bool]:
    """Whether it takes prompts as ids, and whether it gives the ids of its answers."""
    fields: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
    try:
        answer = await client.completions(tokenizer.encode("Hello"), **fields, return_token_ids=True).answer()
        return True, bool(answer.ids)
    except Refused as refused:
        if refused.where.status not in (400, 422):
            raise
    await client.completions("Hello", **fields).answer()
    return False, False
