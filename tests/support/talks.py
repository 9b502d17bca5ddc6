"""Random conversations with tools, held with a server that keeps trajectories."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
from msgspec import Struct, field

MARKER = "<|im_start|>"
"""What opens each message of a prompt. Users write it as well, among their words."""
WORDS = [
    "weather",
    "Paris",
    "seven",
    "(what?)",
    "😀",
    MARKER,
    'quote"',
    "tab\t",
    "ünï",
    "then",
]
MOST_TOKENS = 40
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city"],
}


class Talk(Struct):
    """What was sampled in each turn, and the trajectory that the server tells."""

    marker: int
    """The id of MARKER where it is a control token."""

    sampled: list[list[int]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    """The ids of the answers, turn by turn."""
    prompts: list[list[int]] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """How many messages came with each turn."""
    segments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Each sequence has what was sampled for the answers that it names, and the last is there."""
        return all(map(self._exact, self.segments)) and self.segments[-1]["answers"][-1] == self.answers[-1]

    def _exact(self, segment: dict[str, Any]) -> bool:
        trained = [id_ for id_, was in zip(segment["ids"], segment["mask"], strict=True) if was]
        turns = zip(self.answers, self.sampled, strict=True)
        return trained == [id_ for answer, ids in turns if answer in segment["answers"] for id_ in ids]

    @property
    def goes_on(self) -> int:
        """How many turns went on from the ids of the one before."""
        return len(self._new())

    def _new(self) -> list[tuple[list[int], int]]:
        """What was tokenized for each turn that went on, and how many messages that is."""
        pairs = zip(self.prompts, self.sampled, self.prompts[1:], self.given[1:], strict=False)
        return [
            (then[len(prompt + ids) :], number)
            for prompt, ids, then, number in pairs
            if then[: len(prompt + ids)] == prompt + ids
        ]

    @property
    def text_is_text(self) -> bool:
        """Control tokens stand before messages only: the system's, those given and the one to come."""
        tokenized = [(self.prompts[0], self.given[0] + 1), *self._new()]
        return all(ids.count(self.marker) == number + 1 for ids, number in tokenized)


def sentence(chance: Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))


def choice(chance: Random) -> str:
    return chance.choice(["auto", "required", "none"])


def by_responses(client: httpx.Client, chance: Random, turns: int, **more: object) -> Talk:
    """`more` are further fields of each request."""
    return _by_responses(client, chance, turns, lambda last: {"previous_response_id": last, **more})


def by_conversation(client: httpx.Client, chance: Random, turns: int) -> Talk:
    location = {"conversation": _sent(client, "/v1/conversations", {})["id"]}
    return _by_responses(client, chance, turns, lambda _: location)


def _by_responses(
    client: httpx.Client, chance: Random, turns: int, going_on: Callable[[str | None], dict[str, Any]]
) -> Talk:
    talk, last = _begun(client), None
    rows: list[dict[str, Any]] = [{"role": "user", "content": sentence(chance)}]
    for _ in range(turns):
        body = {
            "input": rows,
            **going_on(last),
            "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
            "tool_choice": choice(chance),
            "parallel_tool_calls": chance.choice([False, True]),
            "max_output_tokens": MOST_TOKENS,
            "return_token_ids": True,
        }
        fields = _sent(client, "/v1/responses", body)
        last = fields["id"]
        (turn,) = fields["turns"]
        talk.given.append(len(rows))
        talk.prompts.append(turn["prompt_token_ids"])
        talk.sampled.append(turn["token_ids"])
        talk.answers.append(fields["id"])
        calls = [item for item in fields["output"] if item["type"] == "function_call"]
        rows = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": sentence(chance)}
            for call in calls
        ] or [{"role": "user", "content": sentence(chance)}]
    talk.segments = _trajectory(client, str(last))
    return talk


def by_history(client: httpx.Client, chance: Random, turns: int) -> Talk:
    talk, id_, new = _begun(client), "", 1
    messages: list[dict[str, Any]] = [{"role": "user", "content": sentence(chance)}]
    for _ in range(turns):
        body = {
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}],
            "tool_choice": choice(chance),
            "parallel_tool_calls": chance.choice([False, True]),
            "max_tokens": MOST_TOKENS,
            "return_token_ids": True,
        }
        fields = _sent(client, "/v1/chat/completions", body)
        id_ = fields["id"]
        talk.given.append(new)
        talk.prompts.append(fields["prompt_token_ids"])
        talk.sampled.append(fields["choices"][0]["token_ids"])
        talk.answers.append(id_)
        result = fields["choices"][0]["message"]
        messages += [result]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": sentence(chance)}
            for call in result.get("tool_calls") or ()
            if _is_json(call["function"]["arguments"])
        ]
        if len(results) < len(result.get("tool_calls") or ()):
            # A call that was cut short cannot be sent back.
            messages[-1] = {"role": "assistant", "content": result["content"] or "-"}
            results = []
        following = results or [{"role": "user", "content": sentence(chance)}]
        messages, new = [*messages, *following], len(following)
    talk.segments = _trajectory(client, id_)
    return talk


def _begun(client: httpx.Client) -> Talk:
    fields = _sent(client, "/tokenize", {"prompt": MARKER, "add_special_tokens": False})
    (marker,) = fields["tokens"]
    return Talk(marker)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _sent(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    fields: dict[str, Any] = reply.json()
    return fields


def _trajectory(client: httpx.Client, id_: str) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = client.get(f"/v1/trajectories/{id_}").json()["segments"]
    return segments


WAYS = {
    "previous_response_id": by_responses,
    "conversation": by_conversation,
    "chat history": by_history,
}
