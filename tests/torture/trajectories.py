"""`python -m tests.torture.trajectories`: random conversations with tools, and the ids of every turn."""

import argparse
import sys
import time
from random import Random

import httpx

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.weights import default_model
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.talks import by_history, by_responses

WAYS = {"previous_response_id": by_responses, "chat history": by_history}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.trajectories", description=__doc__)
    parser.add_argument("--talks", type=int, default=500, help="conversations in all [default: 500]")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    engine = LocalEngine.open(default_model(), LocalOptions(name="smollm2", context=2048, slots=4))
    wrong = kept = turns = 0
    settings = Settings(port=0, store="memory", trajectories=True, dialect="hermes")
    with background(engine, settings) as url, httpx.Client(base_url=url, timeout=120) as client:
        for number in range(args.talks):
            chance = Random(args.seed + number)
            way, hold = list(WAYS.items())[number % len(WAYS)]
            talk = hold(client, chance, chance.randint(2, 4))
            turns, kept = turns + len(talk.sampled) - 1, kept + talk.goes_on
            if not talk.exact:
                wrong += 1
                print(f"\n{way}, seed {args.seed + number}: not what was sampled", flush=True)
            print(f"\r{number + 1} of {args.talks} conversations, {kept} of {turns} turns kept", end="")
    print(f"\n{args.talks - wrong} of {args.talks} conversations exact; seed {args.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
