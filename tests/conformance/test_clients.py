"""Other clients people use, each with one question to the real model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import FROM_SCRATCH, MODEL


def test_langchain_openai(base_url: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(
        model=MODEL,
        base_url=base_url,
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=8,
        extra_body=FROM_SCRATCH,
    )
    whole = chat.invoke("Name three colours.")
    streamed = "".join(str(chunk.content) for chunk in chat.stream("Name three colours."))
    assert whole.content == streamed
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] <= 8


def test_litellm(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its price list would be fetched from elsewhere.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    def ask(stream: bool) -> object:
        return litellm.completion(
            model=f"openai/{MODEL}",
            api_base=base_url,
            api_key="none",
            messages=[{"role": "user", "content": "Name three colours."}],
            temperature=0,
            max_tokens=8,
            stream=stream,
            extra_body=FROM_SCRATCH,
        )

    whole = ask(stream=False).choices[0].message.content  # type: ignore[attr-defined]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))  # type: ignore[attr-defined]
    assert whole == streamed
    assert whole


def test_llm_command_line(base_url: str, tmp_path: Path) -> None:
    tmp_path.joinpath("extra-openai-models.yaml").write_text(
        f'- model_id: local\n  model_name: {MODEL}\n  api_base: "{base_url}"\n'
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", "-m", "local", "-o", "max_tokens", "8", "Name three colours."]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
