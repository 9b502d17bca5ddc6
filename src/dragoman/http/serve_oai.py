"""Serving an engine of any shape that is known, by the name and the arguments that engine authors know."""

from typing import Any

from dragoman.engines.asyncllm import AsyncLLMEngine
from dragoman.engines.protocol import Engine
from dragoman.http.server import serve


def serve_oai(
    engine: Any,
    host: str = "127.0.0.1",
    port: int = 8000,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    **settings: Any,
) -> None:
    """Serves an Engine, or an object with `generate_request`, until a signal says stop.

    Without names of parsers the dialect is read off the chat template, and without a template that of the
    engine's tokenizer is used.
    """
    serve(
        engine if isinstance(engine, Engine) else AsyncLLMEngine(engine),
        template=chat_template,
        host=host,
        port=port,
        tool_call_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        **settings,
    )
