"""Every route there is, with and without keys."""

import httpx

from dragoman.http.routes.table import DELETE, GET, OPEN_PATHS, POST
from tests.attacks.frame import AttackedServer, Reply, check

KEY = "sk-right-0123456789"
OTHER_KEY = "sk-other-0123456789"
OWN = ("/ready", "/metrics", "/version")
ROUTES = [
    *(
        (method, path)
        for method, table in (("POST", POST), ("GET", GET), ("DELETE", DELETE))
        for path in table
    ),
    *(("GET", path) for path in (*OWN, "/health")),
]
CLOSED = [route for route in ROUTES if route[1] not in OPEN_PATHS]
CHAT = "/v1/chat/completions"
FOREIGN = "https://evil.example"
FRIEND = "https://friend.example"


def filled(path: str) -> str:
    """The path of a route, with ids in it that nothing has."""
    for name in ("{id}", "{item_id}", "{model:path}"):
        path = path.replace(name, "x")
    return path


def name(route: tuple[str, str]) -> str:
    return " ".join(route)


def ask(server: AttackedServer, method: str, path: str, **headers: str) -> httpx.Response:
    reply = server.client.request(method, path, headers=headers)
    check(Reply(reply.status_code, reply.content))
    return reply
