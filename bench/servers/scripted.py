"""dragoman around an engine without a model: everything but the computing is what `dragoman serve` does."""

from collections.abc import AsyncIterator

from bench.pulse import Pulse
from bench.servers import options
from bench.words import WORDS
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ByteTokenizer
from dragoman.engines.steps import iterate
from dragoman.http.server import serve
from dragoman.settings import Settings
from dragoman.types import Job, Sink, Step


class UncancellableHandle:
    def cancel(self, index: int | None = None) -> None:
        """All streams of a round are read to their end."""


class PulseEngine:
    def __init__(self, pulse: Pulse) -> None:
        self.tokenizer = ByteTokenizer(WORDS)
        self.card = ModelCard(name="scripted", max_model_len=1 << 20, templates={"default": CHATML})
        self._pulse = pulse
        self._first = len(self.tokenizer.pieces) - len(WORDS)

    def submit(self, job: Job, sink: Sink) -> UncancellableHandle:
        first, last = self._first, self._pulse.tokens - 1

        def beat(number: int) -> None:
            sink(Step([first + number % len(WORDS)], finish="length" if number == last else None))

        self._pulse.join(beat)
        return UncancellableHandle()

    def generate(self, job: Job) -> AsyncIterator[Step]:
        return iterate(self, job)


if __name__ == "__main__":
    parser = options.parser("dragoman around an engine without a model")
    parser.add_argument("--write-interval", type=float, default=0.0, help="as `dragoman serve` [default: 0]")
    args = parser.parse_args()
    settings = Settings(port=args.port, write_interval=args.write_interval)
    serve(PulseEngine(Pulse(args.streams, args.tokens)), settings)
