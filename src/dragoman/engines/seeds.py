"""The seed of each of several answers, whether the engine makes them of one job or of one each."""

from hashlib import blake2b


def seed_of(seed: int, index: int) -> int:
    """The first has the seed as it was given. The others are no seed that somebody else would choose next."""
    if index == 0:
        return seed
    digest = blake2b(f"{seed} {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
