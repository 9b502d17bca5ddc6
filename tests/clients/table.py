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

    @property
    def registry(self) -> Literal["pip", "npm"]:
        return "npm" if "@" in self.packages[0][1:] else "pip"

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2]


CLIENTS = (
    Client("openai", ("openai==3.49.0",), "with_openai.py"),
    Client("openai-2", ("openai==2.8.1",), "with_openai.py"),
    Client("openai-js", ("openai@7.53.0", "zod@4.6.7"), "with_openai.mjs"),
    Client("openai-agents", ("openai-agents==0.24.0",), "with_openai_agents.py"),
    Client("litellm", ("litellm==1.108.4",), "with_litellm.py"),
    Client("langchain-openai", ("langchain-openai==1.7.3",), "with_langchain.py"),
    Client("llm", ("llm==0.36",), "with_llm.py"),
)
BY_NAME = {client.name: client for client in CLIENTS}
