"""dragoman around an engine without a model at a pace, or, with `--upstream`, in front of such servers."""

from bench.servers import options
from bench.words import WORDS
from dragoman.engines.protocol import Engine, ModelCard
from dragoman.engines.scripted import CHATML, ByteTokenizer, Script, ScriptedEngine
from dragoman.http.server import serve
from dragoman.settings import Settings


def make(settings: Settings) -> ScriptedEngine:
    """For `--engine bench.servers.upstreams:make`; `engine_args` say the pace and how long answers are."""
    options = {"tokens": 256, "interval": 0.02, "slots": 256, **settings.engine_args}
    card = ModelCard(
        name="scripted", max_model_len=4096, slots=options["slots"], templates={"default": CHATML}
    )
    return _make_paced(options["tokens"], options["interval"], card)


def _make_paced(tokens: int, interval: float, card: ModelCard | None = None) -> ScriptedEngine:
    tokenizer = ByteTokenizer(WORDS)
    first = len(tokenizer.pieces) - len(WORDS)
    ids = [first + number % len(WORDS) for number in range(tokens)]
    return ScriptedEngine(Script(ids, finish="length"), interval=interval, tokenizer=tokenizer, card=card)


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
