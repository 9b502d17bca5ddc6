"""The flags of the servers without a model."""

import argparse


def parser(what: str) -> argparse.ArgumentParser:
    argument_parser = argparse.ArgumentParser(description=what)
    argument_parser.add_argument("--port", type=int, default=8000, help="port to listen on [default: 8000]")
    argument_parser.add_argument("--streams", type=int, default=1, help="streams of a round [default: 1]")
    argument_parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer [default: 512]")
    return argument_parser
