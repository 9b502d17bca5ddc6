"""A server that reads its model's answers by the model's own response_template."""

import json
from pathlib import Path

from dragoman.engines.scripted import ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.http import HELLO, post, stream
from tests.support.messages import message_of, told

PATH = "/v1/chat/completions"
CONFIG = {
    "response_template": {
        "version": 1,
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "content": {},
            "tool_calls": {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
}
ANSWER = '<think>Hm.</think>Well.<call look>{"at": "sky"}</call>'
ASK = {**HELLO, "tools": [{"type": "function", "function": {"name": "look"}}]}


def test_it_is_named_by_its_file(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(CONFIG))
    url = serve(ScriptedEngine(say(ANSWER)), dialect=str(file))
    [choice] = post(url, PATH, ASK).json()["choices"]
    streamed = message_of(stream(url, PATH, ASK))
    for message in (choice["message"], streamed):
        assert told(message) == [("look", '{"at": "sky"}')]
        assert (message["content"], message["reasoning"]) == (
            "Well.",
            "Hm.",
        )
