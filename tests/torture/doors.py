"""What opens no door, by the ten thousand."""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence

from dragoman.errors import Unauthorized
from dragoman.http.keys import ApiKeys
from dragoman.settings import Settings
from tests.attacks.frame import attacked
from tests.attacks.raw_messages import HOST, JSON
from tests.attacks.raw_socket import Raw
from tests.attacks.test_raw_http import CORPUS, answered_by, by_h11
from tests.torture.page import Row, scaled

KEY = "sk-0123456789abcdef0123456789abcdef"
MB = 2**20
PATHS, COMPARISONS, BODY_MB = 10_000, 100_000, 1024
MOST_T = 4.5
"""Of Welch's test: beyond it two series of times are held to differ."""
ROUNDS = 5
PATIENCE_S = 5.0


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    return [
        messages(),
        random_paths(scaled(PATHS, scale), seed),
        endless_body(BODY_MB),
        key_times(scaled(COMPARISONS, scale, least=1000), seed),
    ]


def messages() -> Row:
    """Two parsers agree on every message of the corpus, or ours takes fewer."""
    with attacked(header_timeout=PATIENCE_S, body_timeout=PATIENCE_S, idle_timeout=PATIENCE_S) as server:
        answered = asyncio.run(answered_by(server.url))
    taken = {name: [one for one in replies if one.status < 400] for name, replies in answered.items()}
    wrong = [name for name, result in taken.items() if len(result) > by_h11(CORPUS[name])]
    smuggled = [name for name, outcome in answered.items() if len(outcome) > 1]
    figure = f"{len(wrong)} disputed, {len(smuggled)} smuggled"
    return Row(f"{len(CORPUS)} malformed messages", figure, "0 and 0", not wrong and not smuggled)


def random_paths(count: int, seed: int) -> Row:
    chance, opened = random.Random(seed), 0
    letters = "abcdefghijklmnopqrstuvwxyz0123456789/._-~;=@:&%2F%2e"
    with attacked(KEY) as server:
        for _ in range(count):
            path = "/" + "".join(chance.choices(letters, k=chance.randint(1, 60)))
            method = chance.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
            reply = server.client.request(
                method, server.url + path, headers={"authorization": "Bearer wrong"}
            )
            opened += reply.status_code not in (400, 401)
    return Row(f"{count:,} random paths without the key", f"{opened} open", "0", opened == 0)


def endless_body(size_mb: int) -> Row:
    head = b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    piece = b"100000\r\n" + b" " * MB + b"\r\n"
    with attacked() as server:
        before, most, sent = server.memory(), 0, 0
        with Raw(server.url) as raw:
            raw.send(head)
            while sent < size_mb and raw.send(piece) == len(piece):
                sent, most = sent + 1, max(most, server.memory() - before)
            statuses = [reply.status for reply in raw.replies()]
    figure = f"{statuses} after {sent} MB, memory + {most / MB:.0f} MB"
    held = statuses == [413] and most <= 32 * MB
    return Row(f"a chunked body of {size_mb:,} MB", figure, "413, + 32 MB", held)


def key_times(count: int, seed: int) -> Row:
    """Of keys that are wrong in their first letter, and of keys that are wrong in their last.

    The median of some rounds: what the machine does besides may show in one of them, a leak in all.
    """
    t = statistics.median(abs(welch(*_times(count, seed + round))) for round in range(ROUNDS))
    return Row(f"{count:,} comparisons of keys: Welch's t", f"{t:.1f}", f"< {MOST_T}", t < MOST_T)


def _times(count: int, seed: int) -> tuple[list[int], list[int]]:
    keys, chance = ApiKeys(Settings(api_key=[KEY])), random.Random(seed)
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(count):
        # Both made anew each time, in any order: where they happen to lie tells more than what they are.
        letter, wrong = chance.choice("ghijklmnop"), [0, -1]
        chance.shuffle(wrong)
        rows = [{b"x-api-key": spoilt(offset, letter)} for offset in wrong]
        which = chance.randrange(2)
        headers = rows[wrong.index(-which)]
        began = time.perf_counter_ns()
        try:
            keys.authenticate(headers)
        except Unauthorized:
            times[which].append(time.perf_counter_ns() - began)
    return times


def spoilt(offset: int, letter: str) -> bytes:
    """The key with another letter at one end."""
    letters = list(KEY)
    letters[offset] = letter
    return "".join(letters).encode()


def welch(one: Sequence[int], two: Sequence[int]) -> float:
    """The slowest tenth is left out: it tells of the machine."""
    limit = sorted([*one, *two])[9 * (len(one) + len(two)) // 10]
    kept = [[time for time in times if time <= limit] for times in (one, two)]
    apart = statistics.fmean(kept[0]) - statistics.fmean(kept[1])
    return apart / math.sqrt(sum(statistics.variance(times) / len(times) for times in kept))
