"""The flags of the servers without a model."""

import argparse


def parser(what: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=what)
    made.add_argument("--port", type=int, default=8000, help="port to listen on [default: 8000]")
    made.add_argument("--streams", type=int, default=1, help="streams of a round [default: 1]")
    made.add_argument("--tokens", type=int, default=512, help="tokens of an answer [default: 512]")
    return made
