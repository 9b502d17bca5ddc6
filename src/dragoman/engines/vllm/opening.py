"""Loading a model with vLLM."""

import gc
import logging

from dragoman.engines.vllm.core import lacking
from dragoman.engines.vllm.engine import VllmEngine
from dragoman.engines.vllm.generating import VllmGenerating
from dragoman.engines.vllm.options import VllmOptions, engine_args
from dragoman.errors import DragomanError, ModelFileError

logger = logging.getLogger("dragoman.engine")


def open_vllm(model: str, options: VllmOptions | None = None) -> VllmEngine | VllmGenerating:
    """Load a folder, or a name that Hugging Face's hub knows; call it outside of an event loop.

    Raises SettingsError, ModelFileError or BindingError where that is not possible.
    """
    options = options or VllmOptions()
    try:
        args = engine_args(model, options)
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(args)
    except DragomanError:
        raise
    except Exception as error:
        logger.error("vLLM could not start", exc_info=error)
        raise ModelFileError(f"vLLM cannot run {model}; the log says why.") from error
    # A million objects of its libraries, which stay: to look for garbage among them holds all answers up.
    gc.collect()
    gc.freeze()
    reason = lacking(llm)
    if reason is None:
        return VllmEngine(llm, name=options.name, adapters=options.adapters)
    logger.warning("vLLM is driven by its generate(), which costs more: %s", reason)
    return VllmGenerating(llm, name=options.name, adapters=options.adapters)
