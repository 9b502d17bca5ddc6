"""The client of `bench.gpu`, a process of its own: `python -m bench.gpu_client PORT STREAMS BODY`.

Sends the body once per stream, reads all answers, and writes what they amount to as JSON.
"""

import sys

import msgspec

from bench.answers import Answer, read
from bench.client import Flight
from bench.errors import BenchError, told
from bench.figures import load_of


def check(answer: Answer, tokens: int) -> Answer:
    if answer.tokens != tokens:
        raise BenchError(f"An answer has {answer.tokens} tokens instead of {tokens}.")
    # Tokens may lack the rest of a character, come several at a time as guesses, or have waited for others.
    if len(answer.times) < 0.1 * tokens:
        raise BenchError(f"An answer of {tokens} tokens came in {len(answer.times)} events.")
    return answer


def main() -> None:
    port, streams, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
    tokens = msgspec.json.decode(body)["max_tokens"]
    traces = Flight(port, [body] * streams).finish()
    load = load_of([check(read(trace), tokens) for trace in traces])
    sys.stdout.buffer.write(msgspec.json.encode(load))


if __name__ == "__main__":
    sys.exit(told(main))
