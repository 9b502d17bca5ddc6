"""Connections, frames and bytes from nobody or from one key, by the thousand, and what another key notices.

Of each kind there are as many as the server lets in. Meanwhile somebody with another key asks, each time on a
new connection, and the memory of the server is looked at.
"""

import http.client
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from msgspec import Struct

from dragoman.limits import Limits
from tests.attacks.frame import AttackedServer, attacked
from tests.attacks.raw_frames import CONTINUATION, PING, TEXT, frame, handshake
from tests.attacks.raw_messages import HOST, JSON, get
from tests.attacks.raw_socket import place
from tests.torture.page import Row, scaled

MINE, OTHERS = "sk-attacker", "sk-other"
MB = 1024 * 1024
CONNECTIONS, SOCKETS, READERS, BODIES = 4000, 1000, 500, 120
LASTS_S = 10.0
ASK_EVERY_S = 0.01
MOST_MS, MOST_KB = 100.0, 128
LIMITS = Limits()
KEYED = HOST + f"Authorization: Bearer {MINE}\r\n".encode()
CLIENT_BYTES = 4096
"""What the system keeps for a client of ours that does not read."""


class Attack(Struct):
    what: str
    count: int
    sent: bytes
    """By each of them when it is there."""
    again: bytes = b""
    """Then as often as it is taken."""
    budget: int = 0
    """Bytes that are allowed for all of them together, beside what is for each."""
    pause: float = 0.0
    """Seconds between two rounds."""


class Observations(Struct):
    before: float
    during: float
    """What the other key's slowest but one of a hundred took, in milliseconds."""
    memory: int
    stays: int
    """Bytes, at most and when it is over."""


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows: list[Row] = []
    with attacked(api_key=[MINE, OTHERS], store="memory") as server:
        for attack in attacks(scale, _stored(server)):
            seen = _tried(server, attack)
            who = f"{attack.count} {attack.what}"
            room = attack.count * MOST_KB * 1024 + attack.budget
            late = seen.during - seen.before
            rows += [
                Row(f"{who}: another key's p99", f"{seen.before:.0f} to {seen.during:.0f} ms",
                    f"+ {MOST_MS:.0f} ms", late <= MOST_MS),
                Row(f"{who}: memory", f"+ {seen.memory / MB:.0f} MB, of which {seen.stays / MB:.0f} stay",
                    f"<= {room / MB:.0f} MB", seen.memory <= room),
            ]  # fmt: skip
            print(*rows[-2:], sep="\n", flush=True)
    return rows


def attacks(scale: float, path: str) -> Iterator[Attack]:
    many, sockets = scaled(CONNECTIONS, scale, 8), scaled(SOCKETS, scale, 4)
    opened = handshake(f"Authorization: Bearer {MINE}\r\n".encode())
    begun = frame(TEXT, b" ", head=0)
    yield Attack("connections on which nothing comes", many, b"")
    yield Attack("heads that come by the byte", many, b"GET /health HTTP/1.1\r\nX: ", b"a", pause=1.0)
    yield Attack("handshakes that are not finished", many, handshake()[:-2])
    yield Attack("WebSockets that are silent", sockets, opened)
    yield Attack(
        "WebSockets with empty frames", sockets, opened, begun + 10_000 * frame(CONTINUATION, head=0)
    )
    yield Attack("WebSockets with pings", sockets, opened, 1000 * frame(PING, b"a" * 125))
    yield Attack("WebSockets with bad messages", sockets, opened, 1000 * frame(TEXT, b"{"))
    unfinished = begun + 15 * frame(CONTINUATION, b" " * MB, head=0)
    yield Attack("WebSockets with half a message", scaled(BODIES, scale, 4), opened, unfinished,
                 budget=LIMITS.bodies_bytes, pause=1.0)  # fmt: skip
    head = b"POST /tokenize HTTP/1.1\r\n" + KEYED + JSON + b"Content-Length: %d\r\n\r\n" % (15 * MB)
    yield Attack("bodies without their last byte", scaled(BODIES, scale, 4), head + b" " * (15 * MB - 1),
                 budget=LIMITS.bodies_bytes)  # fmt: skip
    yield Attack("large replies that are not read", scaled(READERS, scale, 4),
                 get(f"GET {path} HTTP/1.1\r\n".encode(), KEYED), budget=LIMITS.replies_bytes)  # fmt: skip


def _stored(server: AttackedServer) -> str:
    """Where something of 7 MB is."""
    item = {"type": "message", "role": "user", "content": "word " * 1_500_000}
    reply = server.client.post(
        "/v1/conversations", json={"items": [item]}, headers={"authorization": f"Bearer {MINE}"}
    )
    return f"/v1/conversations/{reply.raise_for_status().json()['id']}/items"


def _tried(server: AttackedServer, attack: Attack) -> Observations:
    memory = [server.memory()]
    with _asked(server) as times:
        time.sleep(LASTS_S / 4)
    before = times()
    with _asked(server) as times, ExitStack() as stack:
        until = time.monotonic() + LASTS_S
        opened = [stack.enter_context(one) for one in _opened(server, attack, until)]
        while time.monotonic() < until:
            if attack.again:
                opened = [one for one in opened if _pushed(one, attack.again)]
            memory.append(server.memory())
            time.sleep(attack.pause or 0.02)
    during = times()
    time.sleep(2.5)
    return Observations(before, during, max(memory) - memory[0], server.memory() - memory[0])


def _opened(server: AttackedServer, attack: Attack, until: float) -> Iterator[socket.socket]:
    for _ in range(attack.count):
        result = socket.socket()
        result.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CLIENT_BYTES)
        result.settimeout(max(until - time.monotonic(), 1.0))
        result.connect(place(server.url))
        with suppress(OSError):
            result.sendall(attack.sent)
        result.setblocking(False)
        yield result


def _pushed(one: socket.socket, data: bytes) -> bool:
    """Whether the server has not hung up."""
    try:
        one.send(data)
    except BlockingIOError:
        pass
    except OSError:
        return False
    return True


@contextmanager
def _asked(server: AttackedServer) -> Iterator[Callable[[], float]]:
    """Somebody else asks all the while; gives the p99 of what it took, in milliseconds."""
    over = threading.Event()
    times: list[float] = []

    def ask() -> None:
        while not over.wait(ASK_EVERY_S):
            began = time.perf_counter()
            connection = http.client.HTTPConnection(*place(server.url), timeout=60)
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {OTHERS}"})
            status = connection.getresponse().status
            connection.close()
            times.append(1000 * (time.perf_counter() - began) if status == 200 else 60_000)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield lambda: _p99(times)
    finally:
        over.set()
        thread.join()


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[99 * len(times) // 100]
