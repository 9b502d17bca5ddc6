"""Nothing in a request makes the server ask anywhere else, unless its operator says so. Rows 36 to 42, 80."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.attacks.bodies import SOCKET, good
from tests.attacks.canary import Canary, canary
from tests.attacks.frame import AttackedServer, Frame, attacked, healthy
from tests.mcp.support import RawServer, raw_server

WRITTEN = ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0", "0.0.0.0", "2130706433", "0x7f.1",
           "0177.0.0.1", "127.1", "[::]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"]  # fmt: skip
"""Ways to write the address of this very machine."""
NAMES = ["localhost", "LOCALHOST", "localhost.", "127.0.0.1."]
"""Names that stand for it."""
KEY = "our-secret-key"
ELSEWHERE = [
    "169.254.169.254",
    "10.0.0.1",
    "192.168.0.1",
    "172.16.0.1",
    "100.64.0.1",
    "[fe80::1]",
    "[fc00::1]",
]


@pytest.fixture(scope="module")
def bird() -> Iterator[Canary]:
    with canary() as result:
        yield result


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[AttackedServer]:
    """Requests may name any MCP server."""
    with attacked(mcp_allow=["*"]) as server:
        yield server


@pytest.fixture(scope="module")
def open_to_one() -> Iterator[AttackedServer]:
    """Requests may name MCP servers at one address, which was named itself; and the server has a key."""
    with attacked(mcp_allow=["127.0.0.1:*"], key=KEY) as server:
        yield server


# Media


def chat_parts(url: str) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": url},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "file", "file": {"file_url": url}},
        {"type": "file", "file": {"file_data": url}},
        {"type": "text", "text": "hi", "image_url": {"url": url}},
    ]


def response_parts(url: str) -> list[dict[str, Any]]:
    return [
        {"type": "input_image", "image_url": url},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "input_file", "file_url": url},
        {"type": "input_file", "file_data": url},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_text", "text": "hi", "image_url": url},
    ]


BOMBS = [
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAw1AAAMNQCAYAAAA=",
    "data:audio/wav;base64,UklGRv////9XQVZF",
]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
def test_no_medium_is_fetched_or_decoded_for_a_chat(
    frame: Frame, bird: Canary, route: str, role: str
) -> None:
    for url in (bird.url(), bird.url("localhost").replace("http", "https"), "file:///etc/passwd", *BOMBS):
        for part in chat_parts(url):
            message = {"role": role, "content": [part], "tool_call_id": "a"}
            frame.refused(route, {"messages": [{"role": "user", "content": "hi"}, message]}, status=(400,))
    assert not bird.sings


RESPONSES = {
    "/v1/responses": "input",
    SOCKET: "input",
    "/v1/responses/compact": "input",
    "/v1/responses/input_tokens": "input",
    "/v1/conversations": "items",
    "/v1/conversations/{id}/items": "items",
}


@pytest.mark.parametrize("route", RESPONSES)
def test_no_medium_is_fetched_or_decoded_for_a_response(frame: Frame, bird: Canary, route: str) -> None:
    for url in (bird.url(), "file:///etc/passwd", *BOMBS):
        for part in response_parts(url):
            for item in (
                {"role": "user", "content": [part]},
                {"type": "function_call_output", "call_id": "c", "output": [part]},
            ):
                frame.refused(route, {**good(route), RESPONSES[route]: [item]}, status=(400,))
    assert not bird.sings


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits", "/v1/images/generations"])
def test_there_is_no_other_way_in_for_files(frame: Frame, path: str) -> None:
    assert frame.server.client.post(path, json={"url": "http://127.0.0.1/"}).status_code == 404


@pytest.mark.parametrize(
    "field", ["api_base", "base_url", "user_config", "extra_headers", "api_key", "upstream"]
)
def test_no_field_chooses_whom_the_server_asks(frame: Frame, bird: Canary, field: str) -> None:
    for route in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        SOCKET,
        "/v1/embeddings",
        "/v1/rerank",
    ):
        for value in (bird.url(), {"api_base": bird.url()}):
            assert frame.refused(route, {**good(route), field: value}, status=(400,))["param"] == field
    assert not bird.sings


def test_no_header_chooses_whom_the_server_asks(frame: Frame, bird: Canary) -> None:
    for name in ("x-forwarded-host", "x-api-base", "x-upstream", "forwarded", "x-original-url", "referer"):
        reply = frame.server.client.post(
            "/v1/chat/completions", json=good("/v1/chat/completions"), headers={name: bird.url()}
        )
        assert reply.status_code == 200
    assert not bird.sings


def test_a_link_in_a_schema_is_not_followed(frame: Frame, bird: Canary) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": bird.url()}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    frame.refused("/v1/chat/completions", {**good("/v1/chat/completions"), "response_format": form})
    assert not bird.sings


# MCP servers that requests name


def tool(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "raw", "server_url": url, "require_approval": "never", **fields}


@pytest.mark.parametrize("route", ["/v1/responses", SOCKET])
def test_no_mcp_server_is_asked_that_nobody_allows(frame: Frame, bird: Canary, route: str) -> None:
    for host in (*WRITTEN, *NAMES, *ELSEWHERE):
        frame.refused(route, {**good(route), "tools": [tool(bird.url(host))]}, status=(400,))
    frame.refused("/v1/chat/completions", {**good("/v1/chat/completions"), "tools": [tool(bird.url())]})
    assert not bird.sings


@pytest.mark.parametrize("host", [*WRITTEN, *ELSEWHERE])
def test_whoever_allows_all_does_not_allow_his_own_network(
    open_to_all: AttackedServer, bird: Canary, host: str
) -> None:
    reply = open_to_all.client.post("/v1/responses", json={"input": "hi", "tools": [tool(bird.url(host))]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "mcp_server_not_allowed")
    assert not bird.sings


@pytest.mark.parametrize("host", NAMES)
def test_a_name_of_his_own_network_is_no_public_one(
    open_to_all: AttackedServer, bird: Canary, host: str
) -> None:
    with healthy(open_to_all):
        reply = open_to_all.client.post(
            "/v1/responses", json={"input": "hi", "tools": [tool(bird.url(host))]}
        )
    listed = reply.json()["output"][0]
    assert (reply.status_code, listed["type"]) == (200, "mcp_list_tools")
    assert "could not be reached" in listed["error"]
    assert not bird.sings


@pytest.fixture
def tools() -> Iterator[RawServer]:
    with raw_server() as server:
        yield server


@pytest.mark.parametrize("code", [302, 307])
@pytest.mark.parametrize("where", ["another port", "another name"])
def test_a_redirect_leads_nowhere_and_takes_no_token_along(
    open_to_one: AttackedServer, tools: RawServer, bird: Canary, code: int, where: str
) -> None:
    away = bird.url() if where == "another port" else tools.url.replace("127.0.0.1", "localhost")
    tools.refuses_all, tools.refusal_headers = code, {"location": away}
    own = tool(tools.url, authorization="a-token-for-raw")
    reply = open_to_one.client.post("/v1/responses", json={"input": "hi", "tools": [own]})
    assert reply.json()["output"][0]["error"]
    assert "a-token-for-raw" not in reply.text
    assert not bird.sings
    assert all(heard["host"].startswith("127.0.0.1") for heard in tools.headers)


def test_the_key_of_the_client_is_for_us_alone(open_to_one: AttackedServer, tools: RawServer) -> None:
    for more in ({}, {"authorization": "a-token-for-raw"}):
        body = {"input": "hi", "tools": [tool(tools.url, **more)]}
        assert open_to_one.client.post("/v1/responses", json=body).status_code == 200
    assert tools.headers
    assert KEY not in json.dumps([tools.headers, tools.params])
    assert {heard.get("authorization") for heard in tools.headers} == {None, "Bearer a-token-for-raw"}
