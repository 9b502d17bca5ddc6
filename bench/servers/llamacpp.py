"""llama.cpp's own server, from the same build of llama.cpp that dragoman uses."""

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp's own server")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on [default: 8000]")
    parser.add_argument("--slots", type=int, default=32, help="sequences at the same time [default: 32]")
    parser.add_argument("--context", type=int, default=768, help="tokens of one sequence [default: 768]")
    parser.add_argument("--threads", type=int, default=2, help="compute threads [default: 2]")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.port = args.port
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.context
    # Memory of its own for each slot is llama.cpp's faster way with many streams. The rest stays as it comes:
    # continuous batching, flash attention where it can, the prompt cache.
    params.kv_unified = False
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
