"""A data folder that was written before classes and fields were renamed: this server reads all of it.

`data_before_renames/` has the folder, the file of keys, and the replies of the server that wrote them. It was
made by a chain of responses with a tool call, a response in the background, a conversation, a stored chat
completion, a batch with its files, an unfinished upload, and rewards of a trajectory.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.tool_model import tool_model

FOLDER = Path(__file__).parent / "data_before_renames"
KEY = "sk-dgm-data-before-renames-0123456789"
WRITTEN: dict[str, Any] = json.loads((FOLDER / "replies.json").read_text())


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of a server with a copy of the folder, a minute after it was written: nothing has expired."""
    clock, shift = time.time, WRITTEN["created"] + 60 - time.time()
    monkeypatch.setattr(time, "time", lambda: clock() + shift)
    shutil.copytree(FOLDER, tmp_path / "copy")
    settings = Settings(
        port=0,
        data_dir=str(tmp_path / "copy" / "data"),
        api_key_file=str(tmp_path / "copy" / "keys"),
        dialect="hermes",
        trajectories=True,
    )
    headers = {"authorization": f"Bearer {KEY}"}
    with (
        background(tool_model(lambda job: say("Hello again.")), settings) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60) as client,
    ):
        yield client


def test_every_record_is_read_as_it_was(client: httpx.Client) -> None:
    replies = {path: client.get(path).text for path in WRITTEN["replies"]}
    assert replies == WRITTEN["replies"]


def test_stored_records_can_be_continued(client: httpx.Client) -> None:
    for more in ({"previous_response_id": WRITTEN["second"]}, {"conversation": WRITTEN["conversation"]}):
        reply = client.post("/v1/responses", json={"input": "Go on.", **more})
        assert reply.status_code == 200, reply.text
    chain = client.get(f"/v1/trajectories/{reply.json()['id']}")
    assert chain.status_code == 200, chain.text


def test_an_upload_can_be_completed(client: httpx.Client) -> None:
    completed = client.post(f"/v1/uploads/{WRITTEN['upload']}/complete", json={"part_ids": [WRITTEN["part"]]})
    assert completed.json()["status"] == "completed", completed.text


def test_tokens_of_the_day_still_count(client: httpx.Client) -> None:
    taken = json.loads((FOLDER / "data" / "token-budgets.json").read_text())["taken"]
    reply = client.post("/v1/responses", json={"input": "Hi."})
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 50_000 - sum(taken.values())
