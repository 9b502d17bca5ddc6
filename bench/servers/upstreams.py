"""dragoman around an engine without a model at a pace, or, with `--upstream`, in front of such servers."""

from bench.servers import options
from bench.words import WORDS
from dragoman.engines.protocol import Engine
from dragoman.engines.remote import RemoteEngine
from dragoman.engines.scripted import CHATML, ByteTokenizer, Script, ScriptedEngine
from dragoman.http.server import serve
from dragoman.settings import Settings


def main() -> None:
    parser = options.parser(__doc__ or "")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds of a step [default: 0.02]")
    parser.add_argument("--upstream", action="append", default=[], help="a server to stand in front of")
    args = parser.parse_args()
    tokenizer = ByteTokenizer(WORDS)
    engine: Engine
    if args.upstream:
        engine = RemoteEngine.open(args.upstream, tokenizer)
    else:
        first = len(tokenizer.pieces) - len(WORDS)
        ids = [first + number % len(WORDS) for number in range(args.tokens)]
        engine = ScriptedEngine(Script(ids, finish="length"), interval=args.interval, tokenizer=tokenizer)
    serve(engine, Settings(port=args.port, store="none"), template=CHATML)


if __name__ == "__main__":
    main()
