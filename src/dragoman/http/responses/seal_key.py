"""The key with which reasoning and summaries are sealed: kept beside the store, and as long as it."""

import os
import secrets
from pathlib import Path

from dragoman.settings import Settings
from dragoman.store.opening import default_folder

FILE = "seal.key"
BYTES = 32


def seal_key(settings: Settings) -> bytes:
    """Without a store on disk nothing outlives the process, and neither does the key."""
    if settings.store in ("memory", "none"):
        return secrets.token_bytes(BYTES)
    folder = Path(settings.data_dir).expanduser() if settings.data_dir else default_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / FILE
    try:
        # Made once: of two servers that start together, one makes it, and both read it.
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(made, "wb") as file:
            file.write(secrets.token_bytes(BYTES))
    return path.read_bytes()[:BYTES]
