"""dragoman around an engine without a model at a pace, or, with `--upstream`, in front of such servers."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from bench.servers import options
from bench.words import WORDS
from dragoman.engines.protocol import Engine, ModelCard
from dragoman.engines.scripted import CHATML, ByteTokenizer, Script, ScriptedEngine
from dragoman.http.server import serve
from dragoman.settings import Settings

BLOCK = bytes(256 * 1024)
"""What is computed of: while a digest of it is made, other threads have the interpreter."""


class ComputingEngine(ScriptedEngine):
    """Each token takes so much processor time in a thread beside the event loop, as a model on a CPU does.

    It is the thread's own time that counts: who has to share a processor takes the longer for it.
    """

    token_s = 0.0

    def _arm(self) -> None:
        if self._armed or self._paused or not self._running:
            return
        self._armed = True
        work = asyncio.get_running_loop().run_in_executor(_thread, _compute, self.token_s * self.live)
        work.add_done_callback(lambda _: self._step())


_thread = ThreadPoolExecutor(1)


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sha256(BLOCK).digest()


def make(settings: Settings) -> ScriptedEngine:
    """For `--engine bench.servers.upstreams:make`; `engine_args` say the pace and how long answers are.

    `compute`: seconds of processor time that a token takes, instead of a pace.
    """
    options = {"tokens": 256, "interval": 0.02, "slots": 256, "compute": 0.0, **settings.engine_args}
    card = ModelCard(
        name="scripted", max_model_len=4096, slots=options["slots"], templates={"default": CHATML}
    )
    return _make_paced(options["tokens"], options["interval"], card, options["compute"])


def _make_paced(
    tokens: int, interval: float, card: ModelCard | None = None, compute: float = 0.0
) -> ScriptedEngine:
    tokenizer = ByteTokenizer(WORDS)
    first = len(tokenizer.pieces) - len(WORDS)
    ids = [first + number % len(WORDS) for number in range(tokens)]
    kind = ComputingEngine if compute else ScriptedEngine
    engine = kind(Script(ids, finish="length"), interval=interval, tokenizer=tokenizer, card=card)
    if isinstance(engine, ComputingEngine):
        engine.token_s = compute
    return engine


def main() -> None:
    parser = options.parser(__doc__ or "")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds of a step [default: 0.02]")
    parser.add_argument("--upstream", action="append", default=[], help="a server to stand in front of")
    args = parser.parse_args()
    engine: Engine
    if args.upstream:
        # It needs what the environment of Ray does not have.
        from dragoman.engines.remote import RemoteEngine

        engine = RemoteEngine.open(args.upstream, ByteTokenizer(WORDS))
    else:
        engine = _make_paced(args.tokens, args.interval)
    serve(engine, Settings(port=args.port, store="none"), template=CHATML)


if __name__ == "__main__":
    main()
