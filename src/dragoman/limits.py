"""Every cap there is, in one table. Each is a setting: `[limits]` in the file, `--limit-NAME` as a flag.

They are checked before anything is rendered, allocated or queued for a request.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from dragoman.errors import BadRequest

Cap: TypeAlias = Annotated[int, Meta(ge=1)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body_bytes: Annotated[Cap, Meta(description="bytes of a request body")] = 16 * 1024 * 1024
    bodies_bytes: Annotated[
        Cap, Meta(description="bytes of all request bodies that are received or answered; of each key: half")
    ] = 256 * 1024 * 1024
    replies_bytes: Annotated[
        Cap, Meta(description="bytes of all replies that their clients have not read yet; of each key: half")
    ] = 128 * 1024 * 1024
    file_bytes: Annotated[Cap, Meta(description="bytes of one file that is uploaded")] = 512 * 1024 * 1024
    files: Annotated[Cap, Meta(description="files of one key")] = 10_000
    files_bytes: Annotated[Cap, Meta(description="bytes of all files of one key")] = 8 * 1024 * 1024 * 1024
    uploads: Annotated[
        Cap, Meta(description="files that are received at the same time; of each key: half")
    ] = 32
    document_bytes: Annotated[Cap, Meta(description="bytes of all files that are parts of one request")] = (
        32 * 1024 * 1024
    )
    media_bytes: Annotated[Cap, Meta(description="bytes of one picture or sound")] = 16 * 1024 * 1024
    media_pixels: Annotated[Cap, Meta(description="pixels of one picture, width times height")] = (
        32 * 1024 * 1024
    )
    media_seconds: Annotated[Cap, Meta(description="seconds of one sound")] = 1800
    media_files: Annotated[Cap, Meta(description="pictures and sounds of one request")] = 256
    media_total_bytes: Annotated[Cap, Meta(description="bytes of all pictures and sounds of one request")] = (
        64 * 1024 * 1024
    )
    media_fetches: Annotated[Cap, Meta(description="files that are fetched for one request")] = 32
    batches: Annotated[Cap, Meta(description="batches of one key, those of the last 30 days included")] = 1024
    batch_lines: Annotated[Cap, Meta(description="requests of one batch")] = 50_000
    header_bytes: Annotated[Cap, Meta(description="bytes of the head of a request")] = 64 * 1024
    connections: Annotated[Cap, Meta(description="connections at the same time")] = 4096
    json_depth: Annotated[Cap, Meta(description="values within each other in a request body")] = 128
    json_values: Annotated[Cap, Meta(description="values of a request body, of any kind")] = 320 * 1024
    json_lists: Annotated[Cap, Meta(description="lists and objects of a request body")] = 64 * 1024
    json_names: Annotated[Cap, Meta(description="members of all objects of a request body")] = 64 * 1024
    json_digits: Annotated[Cap, Meta(description="digits of a number")] = 64
    messages: Annotated[Cap, Meta(description="messages of a conversation")] = 4096
    content_chars: Annotated[Cap, Meta(description="characters of all contents together")] = 8 * 1024 * 1024
    parsed_chars: Annotated[Cap, Meta(description="characters of a text that is only parsed")] = 128 * 1024
    content_parts: Annotated[Cap, Meta(description="parts of all contents together")] = 16384
    context_bytes: Annotated[
        Cap, Meta(description="bytes of stored items that one request goes on from or refers to")
    ] = 16 * 1024 * 1024
    tools: Annotated[Cap, Meta(description="tools of a request")] = 512
    tool_bytes: Annotated[Cap, Meta(description="bytes of all tools together, as JSON")] = 1024 * 1024
    tool_calls: Annotated[Cap, Meta(description="calls of tools that the server makes for one response")] = (
        128
    )
    prompts: Annotated[Cap, Meta(description="prompts or texts of one request")] = 256
    prompt_tokens: Annotated[
        Cap | None, Meta(description="tokens of a prompt; default: what the model's context holds")
    ] = None
    encoded_tokens: Annotated[
        Cap, Meta(description="tokens of a text that is only looked at or cut; the context, if that is more")
    ] = 1024 * 1024
    choices: Annotated[Cap, Meta(description="answers of a request: prompts times n or best_of")] = 256
    stops: Annotated[Cap, Meta(description="stop strings and stop ids of a request")] = 64
    stop_chars: Annotated[Cap, Meta(description="characters of one stop string")] = 1024
    logit_bias: Annotated[Cap, Meta(description="entries of logit_bias")] = 1024
    bad_words: Annotated[Cap, Meta(description="entries of bad_words")] = 256
    token_ids: Annotated[Cap, Meta(description="entries of allowed_token_ids")] = 65536
    logprobs: Annotated[Cap, Meta(description="alternatives reported beside each token")] = 20
    told_logprobs: Annotated[
        Cap,
        Meta(description="log probabilities of a reply: of all tokens beside which alternatives are told"),
    ] = 512 * 1024
    told_ids: Annotated[
        Cap, Meta(description="ids of prompts in a reply, where each answer says those of its own")
    ] = 2 * 1024 * 1024
    template_kwargs_chars: Annotated[
        Cap, Meta(description="characters of the values of chat_template_kwargs")
    ] = 65536
    schema_bytes: Annotated[Cap, Meta(description="bytes of one JSON Schema")] = 256 * 1024
    schema_depth: Annotated[Cap, Meta(description="values within each other in a JSON Schema")] = 64
    grammar_chars: Annotated[Cap, Meta(description="characters of a grammar in GBNF or Lark")] = 65536
    pattern_chars: Annotated[Cap, Meta(description="characters of a regular expression")] = 8192
    grammar_choices: Annotated[Cap, Meta(description="texts to choose from")] = 4096
    grammar_cache_bytes: Annotated[Cap, Meta(description="bytes of compiled grammars that are kept")] = (
        48 * 1024 * 1024
    )
    thoughts: Annotated[
        Cap, Meta(description="answers whose reasoning is remembered; the key with the most loses its oldest")
    ] = 65536
    thought_bytes: Annotated[Cap, Meta(description="bytes of all reasoning that is remembered")] = (
        64 * 1024 * 1024
    )
    adapters: Annotated[Cap, Meta(description="LoRA adapters, with those that are loaded later")] = 64
    in_flight: Annotated[
        Cap | None,
        Meta(description="answers computed at the same time; default: 2 for each of the engine's slots"),
    ] = None
    queue: Annotated[int, Meta(ge=0, description="requests that wait beyond those in flight")] = 1024
    looking: Annotated[
        Cap,
        Meta(description="requests that take none of the engine's time, such as /tokenize, at the same time"),
    ] = 128
    per_key: Annotated[
        Cap | None,
        Meta(
            description="requests of one key, running and waiting; default: half of all, if there are several"
        ),
    ] = None


def check_count(count: int, most: int, param: str, what: str) -> None:
    """`check_count(5, 4, "stop", "stop strings")` raises: at most 4 stop strings, got 5."""
    if count > most:
        raise BadRequest(
            f"At most {most} {what} are allowed, got {count}.", param=param, code="limit_exceeded"
        )
