"""Every figure that docs/figures.md states, as a command: `python -m bench`, or one of its parts.

| command | what it measures |
|---|---|
| `python -m bench.stream` | the price of a token on its way to the socket, without a model |
| `python -m bench.parse` | the price of reading a token: dialects beside vLLM's and SGLang's parsers |
| `python -m bench.constrain` | what a schema costs: a real model with and without one |
| `python -m bench.serve` | a real model behind dragoman and behind llama.cpp's own server |
| `python -m bench.flat` | whether they stay as fast with long contexts and a long line of requests |
| `python -m bench.agent` | a turn of an agent's loop as it grows, beside vLLM's way and llama.cpp's server |
| `python -m bench.step` | what of a step is the embedded engine's own work |
| `python -m bench.shapes` | nothing: it writes models of random weights, up to 3B, for `--model` |
| `python -m bench.alone` | one reader, beside llama.cpp's server; not a part of `python -m bench` |
| `python -m bench.gpu` | what HTTP costs 256 streams on a GPU; not a part of `python -m bench` |
| `python -m bench.check` | whether the ratios of docs/figures.toml are true here, by short runs |

The peer is always measured in the same run, so that a ratio means something on a noisy machine.
"""
