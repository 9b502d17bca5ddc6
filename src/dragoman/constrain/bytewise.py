"""A vocabulary in which every byte is an id, for questions about text alone."""

from functools import cache

from dragoman.constrain.vocabulary import Vocabulary

END = 256


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary([*(bytes([byte]) for byte in range(256)), b""], {}, [END])
