"""Mistral: [TOOL_CALLS] and a list of objects; later a name and [ARGS]; [THINK] in reasoning models."""

from dragoman.dialects.declarations import Dialect, JsonCalls, NamedCalls, ReasoningSyntax

THINK = ReasoningSyntax(open=("[THINK]",), close=("[/THINK]",))
LIST = JsonCalls(open=("[TOOL_CALLS] ",), list="must", id=("id",), silent=True, ids="mistral")
NAMED = NamedCalls(
    open=("[TOOL_CALLS]",), then=("[ARGS]", ""), id_after="[CALL_ID]", silent=True, ids="mistral"
)

DIALECTS = (
    Dialect(
        name="mistral_v3",
        models="Mistral 7B v0.3, Nemo, tokenizers v1 to v7",
        stems=("devstral-small-2505", "ministral-8b", "mistral", "mistral-nemo", "mixtral"),
        calls=(LIST,),
        aliases=("mistral_old",),
    ),
    Dialect(
        name="mistral_v11",
        models="Mistral Small 3.2, Devstral, tokenizer v11",
        stems=("devstral", "magistral-small-2506", "mistral-small-3.2", "mistral-small-2506"),
        calls=(NAMED, LIST),
    ),
    Dialect(
        name="mistral_v13",
        models="Ministral 3, Magistral, tokenizer v13",
        stems=("magistral", "ministral-3"),
        reasoning=THINK,
        calls=(NAMED, LIST),
        unfenced=True,
    ),
    Dialect(
        name="mistral",
        models="any Mistral: all of the above",
        reasoning=THINK,
        calls=(NAMED, LIST),
    ),
)
