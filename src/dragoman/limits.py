"""All limits on requests, in one table. Each is a setting: `[limits]` in the file, `--limit-NAME` as a flag.

They are checked before anything is rendered, allocated or queued for a request.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from dragoman.errors import BadRequest

Cap: TypeAlias = Annotated[int, Meta(ge=1)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body_bytes: Annotated[Cap, Meta(description="bytes of a request body")] = 16 * 1024 * 1024
    bodies_bytes: Annotated[
        Cap, Meta(description="bytes of all request bodies being received or answered; per key: half")
    ] = 256 * 1024 * 1024
    replies_bytes: Annotated[
        Cap, Meta(description="bytes of all replies that clients have not read yet; per key: half")
    ] = 128 * 1024 * 1024
    file_bytes: Annotated[Cap, Meta(description="bytes of one uploaded file")] = 512 * 1024 * 1024
    files: Annotated[Cap, Meta(description="files per key")] = 10_000
    files_bytes: Annotated[Cap, Meta(description="bytes of all files of one key")] = 8 * 1024 * 1024 * 1024
    uploads: Annotated[Cap, Meta(description="concurrent uploads; per key: half")] = 32
    document_bytes: Annotated[Cap, Meta(description="bytes of all files that are parts of one request")] = (
        32 * 1024 * 1024
    )
    media_bytes: Annotated[Cap, Meta(description="bytes of one image or audio clip")] = 16 * 1024 * 1024
    media_pixels: Annotated[Cap, Meta(description="pixels of one image, width times height")] = (
        32 * 1024 * 1024
    )
    media_seconds: Annotated[Cap, Meta(description="seconds of one audio clip")] = 1800
    media_files: Annotated[Cap, Meta(description="images and audio clips per request")] = 256
    media_total_bytes: Annotated[Cap, Meta(description="bytes of all images and audio of one request")] = (
        64 * 1024 * 1024
    )
    media_fetches: Annotated[Cap, Meta(description="files fetched for one request")] = 32
    batches: Annotated[Cap, Meta(description="batches per key, including those of the last 30 days")] = 1024
    batch_lines: Annotated[Cap, Meta(description="requests per batch")] = 50_000
    header_bytes: Annotated[Cap, Meta(description="bytes of the headers of a request")] = 64 * 1024
    connections: Annotated[Cap, Meta(description="concurrent connections")] = 4096
    json_depth: Annotated[Cap, Meta(description="nesting depth of a request body")] = 128
    json_values: Annotated[Cap, Meta(description="values in a request body, of any type")] = 320 * 1024
    json_lists: Annotated[Cap, Meta(description="lists and objects in a request body")] = 64 * 1024
    json_names: Annotated[Cap, Meta(description="members of all objects in a request body")] = 64 * 1024
    json_digits: Annotated[Cap, Meta(description="digits of a number")] = 64
    messages: Annotated[Cap, Meta(description="messages of a conversation")] = 4096
    content_chars: Annotated[Cap, Meta(description="characters of all message contents together")] = (
        8 * 1024 * 1024
    )
    parsed_chars: Annotated[Cap, Meta(description="characters of a text that is only parsed")] = 128 * 1024
    content_parts: Annotated[Cap, Meta(description="content parts of all messages together")] = 16384
    context_bytes: Annotated[
        Cap, Meta(description="bytes of stored items that one request continues or references")
    ] = 16 * 1024 * 1024
    tools: Annotated[Cap, Meta(description="tools per request")] = 512
    tool_bytes: Annotated[Cap, Meta(description="bytes of all tools together, as JSON")] = 1024 * 1024
    tool_calls: Annotated[Cap, Meta(description="tool calls that the server executes for one response")] = 128
    prompts: Annotated[Cap, Meta(description="prompts or texts per request")] = 256
    prompt_tokens: Annotated[
        Cap | None, Meta(description="tokens of a prompt; default: the model's context length")
    ] = None
    encoded_tokens: Annotated[
        Cap, Meta(description="tokens of a text to tokenize or truncate; the context length, if larger")
    ] = 1024 * 1024
    choices: Annotated[Cap, Meta(description="answers per request: prompts times n or best_of")] = 256
    stops: Annotated[Cap, Meta(description="stop strings and stop ids per request")] = 64
    stop_chars: Annotated[Cap, Meta(description="characters of one stop string")] = 1024
    logit_bias: Annotated[Cap, Meta(description="entries of logit_bias")] = 1024
    bad_words: Annotated[Cap, Meta(description="entries of bad_words")] = 256
    token_ids: Annotated[Cap, Meta(description="entries of allowed_token_ids")] = 65536
    logprobs: Annotated[Cap, Meta(description="alternatives reported per token")] = 20
    told_logprobs: Annotated[
        Cap,
        Meta(description="log probabilities per reply, counting tokens reported with alternatives"),
    ] = 512 * 1024
    told_ids: Annotated[
        Cap, Meta(description="prompt ids per reply, when every answer repeats those of its prompt")
    ] = 2 * 1024 * 1024
    template_kwargs_chars: Annotated[
        Cap, Meta(description="characters of the values of chat_template_kwargs")
    ] = 65536
    schema_bytes: Annotated[Cap, Meta(description="bytes of one JSON Schema")] = 256 * 1024
    schema_depth: Annotated[Cap, Meta(description="nesting depth of a JSON Schema")] = 64
    grammar_chars: Annotated[Cap, Meta(description="characters of a grammar in GBNF or Lark")] = 65536
    pattern_chars: Annotated[Cap, Meta(description="characters of a regular expression")] = 8192
    grammar_choices: Annotated[Cap, Meta(description="texts to choose from")] = 4096
    grammar_cache_bytes: Annotated[Cap, Meta(description="bytes of cached compiled grammars")] = (
        48 * 1024 * 1024
    )
    thoughts: Annotated[
        Cap, Meta(description="answers whose reasoning is remembered; the key with the most loses its oldest")
    ] = 65536
    thought_bytes: Annotated[Cap, Meta(description="bytes of all remembered reasoning")] = 64 * 1024 * 1024
    adapters: Annotated[Cap, Meta(description="LoRA adapters, including those loaded later")] = 64
    in_flight: Annotated[
        Cap | None,
        Meta(description="concurrent answers; default: 2 per slot of the engine"),
    ] = None
    queue: Annotated[int, Meta(ge=0, description="requests that wait beyond those in flight")] = 1024
    looking: Annotated[
        Cap,
        Meta(description="concurrent requests that do not use the engine, such as /tokenize"),
    ] = 128
    per_key: Annotated[
        Cap | None,
        Meta(description="requests per key, running and waiting; default: half of all, with several keys"),
    ] = None


def check_count(count: int, most: int, param: str, what: str) -> None:
    """Raise if there are too many: `check_count(5, 4, "stop", "stop strings")` says that at most 4 are
    allowed.
    """
    if count > most:
        raise BadRequest(
            f"At most {most} {what} are allowed, got {count}.", param=param, code="limit_exceeded"
        )
