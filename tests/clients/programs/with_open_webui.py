"""Open WebUI: its server, asked as its page asks it. It has a connection for each API of ours; a tool of
its own is called by the model natively, and the answer is what the chat has in the end."""

import atexit
import functools
import json
import os
import socket
import subprocess
import time
import urllib.request
import uuid
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case

BEGIN_SECONDS, ANSWER_SECONDS = 240, 30
LOG = Path("open-webui.log")
TOOL = '''
class Tools:
    def weather(self, city: str) -> str:
        """
        How warm it is in a city.

        :param city: The name of the city.
        """
        return f"21 degrees in {city}"
'''
OPENAI = {"chat": "by_chat", "responses": "by_responses"}
OLLAMA = "by_ollama"
MODELS = {
    **{api: f"{prefix}.{MODEL}" for api, prefix in OPENAI.items()},
    "ollama": f"{OLLAMA}.{MODEL}:latest",
}


class Page:
    """What a page does once somebody is signed in."""

    def __init__(self, base):
        self.base = base
        self.token = "none"
        self.token = self.post("/api/v1/auths/signin", email="", password="")["token"]

    def get(self, path):
        return json.loads(self.sent(path))

    def post(self, path, **body):
        return json.loads(self.sent(path, body))

    def sent(self, path, body=None):
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.base + path, data, headers)
        with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as reply:
            return reply.read().decode()

    def ask(self, api, text, **more):
        messages = [{"role": "user", "content": text}]
        return {"model": MODELS[api], "messages": messages, **more}

    def chat(self, api, text, **more):
        """The answer that is kept in a chat, when it is done."""
        body = self.ask(api, text, stream=True, session_id=uuid.uuid4().hex, parent_id=None, **more)
        said = {"id": uuid.uuid4().hex, "role": "user", "content": text, "parentId": None, "childrenIds": []}
        answer = uuid.uuid4().hex
        body |= {"user_message": said, "message_ids": [{"model_id": body["model"], "message_id": answer}]}
        place = "/api/v1/chats/" + self.post("/api/chat/completions", **body)["chat_id"]
        end = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < end:
            made = self.get(place)["chat"]["history"]["messages"].get(answer, {})
            if made.get("done") or made.get("error"):
                return made
            time.sleep(0.2)
        raise TimeoutError(f"the chat has no answer after {ANSWER_SECONDS} seconds")


@functools.cache
def page(url):
    """Its server, which is there until the program ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        **coding.variables_from_page("open_webui", url),
        "DATA_DIR": str(Path.cwd() / "data"),
        "WEBUI_SECRET_KEY": "none",
        "WEBUI_AUTH": "False",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_ENGINE": "openai",  # Its own would have to be fetched.
        "ANONYMIZED_TELEMETRY": "False",
    }
    command = [
        str(Path(os.environ["CLIENT_BIN"], "open-webui")),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with LOG.open("w") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    atexit.register(running.kill)
    base = f"http://127.0.0.1:{port}"
    wait_for(running, base)
    made = Page(base)
    made.post("/openai/config/update", **json.loads(coding.from_page("open_webui", "json", url)))
    made.post(
        "/ollama/config/update",
        ENABLE_OLLAMA_API=True,
        OLLAMA_BASE_URLS=[url.removesuffix("/v1")],
        OLLAMA_API_CONFIGS={"0": {"enable": True, "prefix_id": OLLAMA}},
    )
    made.get("/api/models?refresh=true")
    made.post("/api/v1/tools/create", id="sky", name="sky", content=TOOL, meta={"description": "of the sky"})
    return made


def wait_for(running, base):
    end = time.monotonic() + BEGIN_SECONDS
    while time.monotonic() < end and running.poll() is None:
        try:
            urllib.request.urlopen(f"{base}/health", timeout=2).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(f"Open WebUI did not begin: {LOG.read_text()[-300:]}")


def parts(made, kind):
    return [item for item in made["output"] if item["type"] == kind]


@case("models", "listed")
def models(url):
    listed = {one["id"] for one in page(url).get("/api/models")["data"]}
    assert set(MODELS.values()) <= listed, listed


@case("chat", "plain")
def plain(url):
    here = page(url)
    made = here.post("/api/chat/completions", **here.ask("chat", cases.NAME_A_COLOUR))
    assert made["choices"][0]["message"]["content"] == cases.COLOUR


@case("chat", "a stream passed on")
def passed_on(url):
    here = page(url)
    lines = here.sent(
        "/api/chat/completions", here.ask("chat", cases.NAME_A_COLOUR, stream=True)
    ).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == cases.COLOUR


def stream(url, api):
    assert page(url).chat(api, cases.NAME_A_COLOUR)["content"] == cases.COLOUR


def tools(url, api):
    made = page(url).chat(api, cases.HOW_WARM, tool_ids=["sky"], params={"function_calling": "native"})
    assert [call["name"] for call in parts(made, "function_call")] == ["weather"], made
    assert made["content"].endswith(cases.WARM), made


def reasoning(url, api):
    made = page(url).chat(api, cases.THINK_OF_A_COLOUR)
    [thought] = parts(made, "reasoning")
    said = [part["text"] for part in thought.get("content") or thought["summary"]]
    assert (said, made["content"]) == ([cases.THOUGHT], cases.COLOUR), made


TRIED = {"stream": stream, "tools": tools, "reasoning": reasoning}


def of(api, what):
    return case(api, what)(lambda url: TRIED[what](url, api))


globals().update({f"{api}_{what}": of(api, what) for api in MODELS for what in TRIED})

if __name__ == "__main__":
    cases.main(globals())
