"""dragoman serves any language-model engine over the OpenAI API, in the engine's own process.

import dragoman
dragoman.serve(engine, port=8000)  # any object with the Engine protocol
dragoman.parse(text, dialect="hermes").calls  # the parsers alone
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dragoman._version import __version__
from dragoman.engines.protocol import Engine, ModelCard, Tokenizer
from dragoman.errors import DragomanError
from dragoman.settings import Settings
from dragoman.types import Answer, Event, Job, Sampling, Step, TextStep, ToolCall

if TYPE_CHECKING:
    from dragoman.client import AsyncClient, Client
    from dragoman.constrain.constraint import Constraint
    from dragoman.dialects.parser import Parser, parse, parse_reasoning_complete, parse_tool_call_complete
    from dragoman.dialects.registry import list_dialects
    from dragoman.dialects.render import render
    from dragoman.engines.supervisor import SupervisedEngine
    from dragoman.http.app import App
    from dragoman.http.server import aserve, aserve_oai, background, serve, serve_oai
    from dragoman.prompt.find import find_dialect
    from dragoman.types import fold

__all__ = [
    "Answer",
    "App",
    "AsyncClient",
    "Client",
    "Constraint",
    "DragomanError",
    "Engine",
    "Event",
    "Job",
    "ModelCard",
    "Parser",
    "Sampling",
    "Settings",
    "Step",
    "SupervisedEngine",
    "TextStep",
    "Tokenizer",
    "ToolCall",
    "__version__",
    "aserve",
    "aserve_oai",
    "background",
    "find_dialect",
    "fold",
    "list_dialects",
    "parse",
    "parse_reasoning_complete",
    "parse_tool_call_complete",
    "render",
    "serve",
    "serve_oai",
]

# Load the server and the client on first use: importing the library alone stays quick.
_LAZY = {
    "App": "dragoman.http.app",
    "AsyncClient": "dragoman.client",
    "Client": "dragoman.client",
    "Constraint": "dragoman.constrain.constraint",
    "Parser": "dragoman.dialects.parser",
    "SupervisedEngine": "dragoman.engines.supervisor",
    "aserve": "dragoman.http.server",
    "aserve_oai": "dragoman.http.server",
    "background": "dragoman.http.server",
    "find_dialect": "dragoman.prompt.find",
    "fold": "dragoman.types",
    "list_dialects": "dragoman.dialects.registry",
    "parse": "dragoman.dialects.parser",
    "parse_reasoning_complete": "dragoman.dialects.parser",
    "parse_tool_call_complete": "dragoman.dialects.parser",
    "render": "dragoman.dialects.render",
    "serve": "dragoman.http.server",
    "serve_oai": "dragoman.http.server",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dragoman' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
