"""SillyTavern: its server, asked as its page asks it, with all the values that its sliders have at first. By
Chat Completions, and by text completions as it speaks to several kinds of servers."""

import atexit
import functools
import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case

BEGIN_SECONDS = 120
LOG = Path("sillytavern.log")
CHAT = {
    "custom_prompt_post_processing": "",
    "custom_include_body": "",
    "custom_exclude_body": "",
    "custom_include_headers": "",
    "temperature": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_p": 1,
    "max_tokens": 300,
    "stop": [],
    "user_name": "User",
    "char_name": "Assistant",
    "group_names": [],
    "include_reasoning": True,
    "reasoning_effort": "auto",
    "enable_web_search": False,
    "request_images": False,
    "type": "quiet",
}
ALL = {
    "model": MODEL,
    "max_new_tokens": 300,
    "max_tokens": 300,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0.0,
    "smoothing_curve": 1.0,
    "dry_allowed_length": 2,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": ["\nUser:"],
    "stop": ["\nUser:"],
    "truncation_length": 8192,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0.0,
    "top_n_sigma": 0.0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
}
MOST = {
    "rep_pen": 1.2,
    "rep_pen_range": 0,
    "rep_pen_slope": 1,
    "repetition_penalty_range": 0,
    "guidance_scale": 1,
    "negative_prompt": "",
    "repeat_penalty": 1.2,
    "repeat_last_n": 0,
    "n_predict": 300,
    "num_predict": 300,
    "num_ctx": 8192,
    "mirostat": 0,
    "ignore_eos": False,
}
PRIORITY = [
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "temperature"),
    *("dynamic_temperature", "quadratic_sampling", "top_n_sigma", "top_k", "top_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "tfs", "top_a", "min_p", "adaptive_p", "mirostat", "xtc"),
    *("encoder_repetition_penalty", "no_repeat_ngram"),
]
KINDS = {
    "generic": MOST,
    "ollama": MOST,
    "vllm": {"n": 1, "ignore_eos": False, "spaces_between_special_tokens": True},
    "aphrodite": {
        "n": 1,
        "temperature_last": True,
        "eta_cutoff": 0,
        "epsilon_cutoff": 0,
        "ignore_eos": False,
        "spaces_between_special_tokens": True,
        "early_stopping": False,
        "include_stop_str_in_output": False,
        "custom_token_bans": [],
        "no_repeat_ngram_size": 0,
    },
    "tabby": {**MOST, "n": 1, "temperature_last": True, "repetition_decay": 0, "speculative_ngram": False},
    "ooba": {
        **MOST,
        "temperature_last": True,
        "sampler_priority": PRIORITY,
        "min_length": 0,
        "num_beams": 1,
        "length_penalty": 1,
        "early_stopping": False,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "encoder_repetition_penalty": 1,
        "no_repeat_ngram_size": 0,
        "penalty_alpha": 0,
        "do_sample": True,
    },
}


@functools.cache
def server():
    """Where it listens, until the program ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(os.environ["CLIENT_BIN"]).parent / "sillytavern"
    words = [
        "--port",
        str(port),
        "--dataRoot",
        str(Path.cwd() / "data"),
        "--disableCsrf",
        "--browserLaunchEnabled=false",
    ]
    words += ["--configPath", str(Path.cwd() / "config.yaml")]
    with LOG.open("w") as log:
        running = subprocess.Popen(
            ["node", "server.js", *words], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    atexit.register(running.kill)
    base, end = f"http://127.0.0.1:{port}", time.monotonic() + BEGIN_SECONDS
    while time.monotonic() < end and running.poll() is None:
        try:
            urllib.request.urlopen(f"{base}/version", timeout=2).close()
        except OSError:
            time.sleep(0.3)
        else:
            return base
    raise TimeoutError(f"SillyTavern did not begin: {LOG.read_text()[-300:]}")


def post(path, **body):
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(server() + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=30) as reply:
        return reply.read().decode()


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def chat(url, *messages, **more):
    named = json.loads(coding.from_page("sillytavern", "json", url))
    body = {**CHAT, **named, "messages": list(messages), **more}
    return post("/api/backends/chat-completions/generate", **body)


def user(text):
    return {"role": "user", "content": text}


@case("chat", "models")
def models(url):
    said = json.loads(
        post("/api/backends/chat-completions/status", chat_completion_source="custom", custom_url=url)
    )
    assert [one["id"] for one in said["data"]] == [MODEL], said


@case("chat", "plain")
def plain(url):
    said = json.loads(chat(url, user(cases.NAME_A_COLOUR), stream=False))
    assert said["choices"][0]["message"]["content"] == cases.COLOUR, said


@case("chat", "stream")
def stream(url):
    deltas = [one["choices"][0]["delta"] for one in events(chat(url, user(cases.NAME_A_COLOUR), stream=True))]
    assert "".join(delta.get("content") or "" for delta in deltas) == cases.COLOUR, deltas


@case("chat", "reasoning")
def reasoning(url):
    deltas = [
        one["choices"][0]["delta"] for one in events(chat(url, user(cases.THINK_OF_A_COLOUR), stream=True))
    ]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == cases.THOUGHT, deltas


@case("chat", "tools")
def tools(url):
    asked = user(cases.HOW_WARM)
    more = {"tools": [cases.TOOL], "tool_choice": "auto", "stream": False}
    called = json.loads(chat(url, asked, **more))["choices"][0]["message"]
    [call] = called["tool_calls"]
    # What it keeps of a call, and how it tells the result.
    kept = {"role": "assistant", "content": "[]", "tool_calls": called["tool_calls"]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": cases.RESULT}
    said = json.loads(chat(url, asked, kept, result, **more))
    assert said["choices"][0]["message"]["content"] == cases.WARM, said


def text_of(said):
    """Ollama's are passed on as they are."""
    return said["choices"][0]["text"] if "choices" in said else said["response"]


def of(kind, what):
    def tried(url):
        body = {**ALL, **KINDS[kind], "api_type": kind, "api_server": url.removesuffix("/v1")}
        body |= {"prompt": cases.NAME_A_COLOUR, "stream": what == "stream"}
        said = post("/api/backends/text-completions/generate", **body)
        made = events(said) if what == "stream" else [json.loads(said)]
        assert not any(one.get("error") for one in made), said
        assert "".join(map(text_of, made)) == cases.COLOUR, said

    return case(f"completions ({kind})", what)(tried)


globals().update({f"{kind}_{what}": of(kind, what) for kind in KINDS for what in ("plain", "stream")})

if __name__ == "__main__":
    cases.main(globals())
