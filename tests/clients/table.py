"""The clients that `make clients` runs, each as its makers publish it, in the version that is named here."""

from typing import Literal

from msgspec import Struct

COLUMNS = ("plain", "stream", "tools", "reasoning")
"""What every client is tried with, as far as it can; whatever else a program tries has a column for all."""


class Client(Struct, frozen=True):
    name: str
    packages: tuple[str, ...]
    """`openai==3.49.0` for pip, `openai@7.53.0` for npm."""
    program: str
    """A file of `tests/clients/programs`, for Python or for Node.js."""
    refusals: int = 0
    """How many requests of the program the server has to refuse."""

    @property
    def registry(self) -> Literal["pip", "npm"]:
        return "npm" if "@" in self.packages[0][1:] else "pip"

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2]


CLIENTS = (
    Client("openai", ("openai==3.49.0",), "with_openai.py"),
    Client("openai-2", ("openai==2.54.0",), "with_openai.py"),
    Client("openai-js", ("openai@7.53.0", "zod@4.6.7"), "with_openai.mjs"),
    Client("openai-agents", ("openai-agents==0.24.0",), "with_openai_agents.py"),
    Client("litellm", ("litellm==1.106.2", "mcp"), "with_litellm.py", refusals=1),
    Client("langchain-openai", ("langchain-openai==1.7.3",), "with_langchain.py"),
    Client(
        "langchain-tests", ("langchain-tests==1.1.9", "langchain-openai==1.7.3"), "with_langchain_tests.py"
    ),
    Client("llm", ("llm==0.36",), "with_llm.py"),
    Client("ollama", ("ollama==0.6.3",), "with_ollama.py"),
    Client("ollama-js", ("ollama@0.6.4",), "with_ollama.mjs"),
    Client("anthropic", ("anthropic==2.8.0",), "with_anthropic.py", refusals=4),
    Client("langchain-anthropic", ("langchain-anthropic==1.7.7",), "with_langchain_anthropic.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.66.0",), "with_pydantic_ai.py"),
    Client("llama-index", ("llama-index-llms-openai-like==0.8.1", "llama-index-core"), "with_llama_index.py"),
    Client("haystack", ("haystack-ai==3.4.0",), "with_haystack.py"),
    Client("instructor", ("instructor==1.17.0",), "with_instructor.py"),
    Client("smolagents", ("smolagents[openai]==1.26.0",), "with_smolagents.py"),
    Client("outlines", ("outlines[openai]==1.3.3",), "with_outlines.py"),
    Client("guidance", ("guidance[openai]==0.3.1",), "with_guidance.py"),
    Client("lm-eval", ("lm-eval[api]==0.4.13",), "with_lm_eval.py"),
    Client("lm-eval-0.4.9", ("lm-eval[api]==0.4.9", "transformers<5"), "with_lm_eval.py"),
    Client(
        "ai-sdk",
        (
            "ai@7.0.169",
            "@ai-sdk/openai@4.0.114",
            "@ai-sdk/openai-compatible@3.0.90",
            "@ai-sdk/anthropic@4.0.102",
            "zod@4.6.7",
        ),
        "with_ai_sdk.mjs",
    ),
    Client("langgraph", ("langchain==1.4.7", "langchain-openai==1.7.3"), "with_langgraph.py"),
    Client("autogen", ("autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5"), "with_autogen.py"),
    Client("ag2", ("ag2[openai]==1.2.1",), "with_ag2.py"),
    Client("semantic-kernel", ("semantic-kernel==1.45.0",), "with_semantic_kernel.py"),
    Client("inspect-ai", ("inspect-ai==0.3.285", "openai"), "with_inspect_ai.py"),
    Client("dspy", ("dspy==3.4.1",), "with_dspy.py"),
    Client("crewai", ("crewai==1.15.30",), "with_crewai.py"),
    Client("aider", ("aider-chat==0.86.2",), "with_aider.py"),
    Client("codex", ("@openai/codex@0.166.0",), "with_codex.py"),
    Client("claude-code", ("@anthropic-ai/claude-code@2.1.325",), "with_claude_code.py"),
    Client("opencode", ("opencode-ai@1.18.33",), "with_opencode.py"),
    Client("qwen-code", ("@qwen-code/qwen-code@0.24.4",), "with_qwen_code.py"),
    Client("pi", ("@mariozechner/pi-coding-agent@0.73.1",), "with_pi.py"),
    Client("continue", ("@continuedev/cli@1.5.47",), "with_continue.py"),
    Client("cline", ("cline@3.0.65",), "with_cline.py"),
    Client("open-webui", ("open-webui==0.12.4",), "with_open_webui.py"),
    Client("sillytavern", ("sillytavern@1.19.0",), "with_sillytavern.py"),
    Client("librechat", ("@librechat/agents@3.9.2",), "with_librechat.mjs"),
    Client("mcp-agent", ("mcp-agent[openai]==0.2.6", "mcp<2"), "with_mcp_agent.py"),
    Client("verifiers", ("verifiers==0.4.0",), "with_verifiers.py"),
)
BY_NAME = {client.name: client for client in CLIENTS}
