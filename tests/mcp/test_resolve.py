"""Which servers a request may name."""

import pytest

from dragoman.errors import TOOLS, BadRequest, SettingsError
from dragoman.mcp import McpServers, McpServerSpec

FILES = McpServerSpec(label="files", command="files-server")
ALLOW = ["example.com", "tools.example.com:8443", "localhost:*", "[::1]:9000"]
SERVERS = McpServers({"files": FILES}, ALLOW)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/mcp",
        "http://example.com",
        "https://EXAMPLE.com:443/mcp?x=1",
        "https://tools.example.com:8443/",
        "http://localhost:1/sse",
        "http://[::1]:9000/mcp",
    ],
)
def test_an_allowed_address(url: str) -> None:
    spec = SERVERS.resolve("any", url, {"X-Key": "k"}, "token")
    assert (spec.label, spec.url, spec.authorization) == ("any", url, "token")
    assert spec.all_headers() == {"X-Key": "k", "Authorization": "Bearer token"}
    assert spec.command is None


@pytest.mark.parametrize(
    "url",
    [
        "https://elsewhere.com/mcp",
        "https://example.com:8443/mcp",
        "https://tools.example.com/mcp",
        "https://example.com.elsewhere.com/mcp",
        "https://notexample.com/mcp",
        "http://169.254.169.254/latest",
        "http://[::2]:9000/mcp",
    ],
)
def test_an_address_that_is_not_allowed_names_the_setting(url: str) -> None:
    with pytest.raises(BadRequest, match="mcp_allow") as caught:
        SERVERS.resolve("any", url)
    assert (caught.value.param, caught.value.code) == (TOOLS, "mcp_server_not_allowed")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/",
        "file:///etc/passwd",
        "example.com/mcp",
        "https://",
        "",
        "https://example.com@elsewhere.com/",
        "https://me:secret@example.com/",
        "https://example.com\\@elsewhere.com/",
        "https://elsewhere.com#@example.com/",
        "https://example.com/\r\nHost: elsewhere.com",
        "https://example.com /",
        "https://exämple.com/",
        "https://example.com:port/",
        " https://example.com/",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(BadRequest, match="must be http") as caught:
        McpServers(allow=["*"]).resolve("any", url)
    assert "secret" not in caught.value.message


def test_a_star_allows_every_host() -> None:
    assert McpServers(allow=["*"]).resolve("any", "http://anything:1/").url == "http://anything:1/"


def test_nothing_is_allowed_by_default() -> None:
    with pytest.raises(BadRequest, match="mcp_allow"):
        McpServers().resolve("any", "http://localhost/mcp")


def test_a_label_alone_is_a_configured_server() -> None:
    assert SERVERS.resolve("files") is FILES
    assert SERVERS.configured() == ["files"]


def test_a_label_that_is_not_configured() -> None:
    with pytest.raises(BadRequest, match=r"Configured servers: files\.") as caught:
        SERVERS.resolve("file")
    assert caught.value.code == "mcp_server_not_found"


def test_a_configured_server_takes_no_headers_of_a_request() -> None:
    for value in ({"headers": {"X": "y"}}, {"authorization": "token"}):
        with pytest.raises(BadRequest, match="configured by the operator"):
            SERVERS.resolve("files", **value)


@pytest.mark.parametrize(
    ("headers", "authorization"),
    [
        ({"X-Key": "secret\r\nHost: elsewhere"}, None),
        ({"X-Key": "sécret"}, None),
        ({"Host": "elsewhere"}, None),
        ({"transfer-encoding": "chunked"}, None),
        ({"X Key": "secret"}, None),
        ({"": "secret"}, None),
        ({}, "secret and more"),
        ({}, ""),
        ({"authorization": "secret"}, "secret"),
    ],
)
def test_headers_that_may_not_be_sent(headers: dict[str, str], authorization: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        SERVERS.resolve("any", "https://example.com/", headers, authorization)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "entry", ["https://example.com", "example.com/mcp", "a:b", "a b", "", "*.example.com"]
)
def test_an_entry_that_could_never_match(entry: str) -> None:
    with pytest.raises(SettingsError, match="`mcp_allow`"):
        McpServers(allow=[entry])


def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    McpServers()
    with pytest.raises(SettingsError, match=r"pip install 'dragoman\[mcp\]'"):
        McpServers(allow=["example.com"])
