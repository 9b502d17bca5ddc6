"""Read a reply of any API, whole or a stream, as an answer that can be compared."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, field

from tests.soak.fault import Fault
from tests.soak.question import Api
from tests.support.wire import RawReply

SSE_ENDS = {
    "chat": ("[DONE]",),
    "completions": ("[DONE]",),
    "responses": ("[DONE]",),
    "messages": ("message_stop",),
}


class Choice(Struct):
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Names and arguments."""
    finish: str = ""


class Answer(Struct):
    choices: list[Choice]
    tokens: int
    handle: Any = None
    """The id or the context that a next question continues from; it is never compared."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    def is_same(self, other: "Answer") -> bool:
        return self.choices == other.choices and self.tokens == other.tokens


def read_answer(api: Api, heard: RawReply, stream: bool) -> Answer:
    """Raises a `Fault` where there is none."""
    _check_status(heard)
    try:
        if not stream:
            return _WHOLE[api](json.loads(heard.body))
        events = list(_lines(heard.body) if api.startswith("ollama") else _sse(api, heard.body))
        _check_events(events, heard)
        return _STREAMED[api](events)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise Fault("unfinished", f"a reply that cannot be read: {error!r}", heard.data) from error


def _check_status(heard: RawReply) -> None:
    if heard.status != 200:
        retry = b"\r\nretry-after:" in heard.head.lower()
        raise Fault("5xx" if heard.status >= 500 else "4xx", f"status {heard.status}", heard.data, retry)


def _check_events(events: list[dict[str, Any]], heard: RawReply) -> None:
    for event in events:
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            raise Fault("error in a stream", json.dumps(event)[:300], heard.data)


def _sse(api: Api, body: bytes) -> Iterator[dict[str, Any]]:
    last = ""
    for line in body.decode().splitlines():
        if line.startswith("data: "):
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                event: dict[str, Any] = json.loads(last)
                last = event.get("type", "")
                yield event
                if event.get("error") or last in ("error", "response.failed"):
                    return
    if last not in SSE_ENDS[api]:
        raise ValueError(f"the stream ends with {last!r}")


def _lines(body: bytes) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    for line in body.decode().splitlines():
        event = json.loads(line)
        yield event
    if not event.get("done") and "error" not in event:
        raise ValueError("the stream ends without its last line")


def _call(name: str, arguments: Any) -> list[str]:
    """Write arguments in one way, since APIs differ in spaces and in whether they are a string."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return [name, str(arguments)]
    return [name, json.dumps(value, sort_keys=True)]


def _read_chat(body: dict[str, Any]) -> Answer:
    choices = []
    for choice in body["choices"]:
        message = choice["message"]
        calls = [_call(**call["function"]) for call in message.get("tool_calls") or ()]
        choices.append(Choice(message["content"] or "", calls, choice["finish_reason"]))
    return Answer(choices, body["usage"]["completion_tokens"])


def _fold_chat(events: list[dict[str, Any]]) -> Answer:
    choices: dict[int, Choice] = {}
    tokens = 0
    for event in events:
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], Choice())
            choice.text += part["delta"].get("content") or ""
            choice.finish = part["finish_reason"] or choice.finish
            for call in part["delta"].get("tool_calls") or ():
                if call["index"] == len(choice.calls):
                    choice.calls.append(["", ""])
                choice.calls[call["index"]][0] += call["function"].get("name") or ""
                choice.calls[call["index"]][1] += call["function"].get("arguments") or ""
    return Answer(_in_order(choices), tokens)


def _in_order(choices: dict[int, Choice]) -> list[Choice]:
    ordered = [choices[index] for index in sorted(choices)]
    for choice in ordered:
        choice.calls = [_call(*call) for call in choice.calls]
    return ordered


def _read_completions(body: dict[str, Any]) -> Answer:
    choices = [Choice(choice["text"], [], choice["finish_reason"]) for choice in body["choices"]]
    return Answer(choices, body["usage"]["completion_tokens"])


def _fold_completions(events: list[dict[str, Any]]) -> Answer:
    choices: dict[int, Choice] = {}
    tokens = 0
    for event in events:
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], Choice())
            choice.text += part["text"]
            choice.finish = part["finish_reason"] or choice.finish
    return Answer(_in_order(choices), tokens)


def _read_responses(body: dict[str, Any]) -> Answer:
    choice = Choice(finish=body["status"])
    for item in body["output"]:
        if item["type"] == "function_call":
            choice.calls.append(_call(item["name"], item["arguments"]))
        elif item["type"] == "message":
            choice.text += "".join(part["text"] for part in item["content"])
    return Answer([choice], body["usage"]["output_tokens"], body["id"])


def _fold_responses(events: list[dict[str, Any]]) -> Answer:
    answer = _read_responses(events[-1]["response"])
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    if "".join(deltas) != answer.text:
        raise ValueError("the deltas of the stream are not its answer")
    return answer


def _read_messages(body: dict[str, Any]) -> Answer:
    choice = Choice(finish=body["stop_reason"])
    for block in body["content"]:
        if block["type"] == "tool_use":
            choice.calls.append(_call(block["name"], block["input"]))
        else:
            choice.text += block["text"]
    return Answer([choice], body["usage"]["output_tokens"])


def _fold_messages(events: list[dict[str, Any]]) -> Answer:
    choice, tokens = Choice(), 0
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            choice.calls.append([event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta":
            choice.text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                choice.calls[-1][1] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            choice.finish, tokens = event["delta"]["stop_reason"], event["usage"]["output_tokens"]
    return Answer(_in_order({0: choice}), tokens)


def _fold_ollama(events: list[dict[str, Any]]) -> Answer:
    choice = Choice()
    for event in events:
        message = event.get("message", {})
        choice.text += message.get("content", "") + event.get("response", "")
        choice.calls += [_call(**call["function"]) for call in message.get("tool_calls", ())]
    choice.finish = events[-1]["done_reason"]
    return Answer([choice], events[-1]["eval_count"], events[-1].get("context"))


_WHOLE: dict[Api, Callable[[dict[str, Any]], Answer]] = {
    "chat": _read_chat,
    "completions": _read_completions,
    "responses": _read_responses,
    "messages": _read_messages,
    "ollama chat": lambda body: _fold_ollama([body]),
    "ollama generate": lambda body: _fold_ollama([body]),
}
_STREAMED = {
    "chat": _fold_chat,
    "completions": _fold_completions,
    "responses": _fold_responses,
    "messages": _fold_messages,
    "ollama chat": _fold_ollama,
    "ollama generate": _fold_ollama,
}
