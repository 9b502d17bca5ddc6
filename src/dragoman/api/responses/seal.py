"""Texts that a client keeps for us, and can neither read nor change: reasoning and summaries."""

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PREFIX = "dgm1_"
"""The version: how everything after it is to be read."""
PURPOSE = b"dragoman sealed text 1"
NONCE_BYTES = 12
TAG_BYTES = 16
LEAST_KEY_BYTES = 16


class Sealer:
    """Seals texts for one owner each: nobody else's request can use them."""

    def __init__(self, key: bytes) -> None:
        if len(key) < LEAST_KEY_BYTES:
            raise ValueError(f"A key for sealing must have at least {LEAST_KEY_BYTES} bytes.")
        # Derived, so that a key which is used for something else too gives nothing away there.
        derived = HKDF(SHA256(), length=32, salt=None, info=PURPOSE).derive(key)
        self._cipher = AESGCM(derived)

    def seal(self, text: str, owner: str) -> str:
        nonce = os.urandom(NONCE_BYTES)
        # A model may write a lone surrogate, which is no UTF-8.
        sealed = self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), _bound(owner))
        return _coded(nonce + sealed)

    def open(self, sealed: str, owner: str) -> str | None:
        """None for whatever was not sealed here, for this owner, as it is."""
        try:
            raw = urlsafe_b64decode(sealed.removeprefix(PREFIX))
            # The decoder skips what it does not know, so one text has many codings: only ours counts.
            if _coded(raw) != sealed or len(raw) < NONCE_BYTES + TAG_BYTES:
                return None
            opened = self._cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], _bound(owner))
        except (ValueError, InvalidTag):
            return None
        return opened.decode("utf-8", "surrogatepass")


def _coded(raw: bytes) -> str:
    return PREFIX + urlsafe_b64encode(raw).decode()


def _bound(owner: str) -> bytes:
    """What the seal covers beside the text."""
    return PURPOSE + b"\0" + owner.encode("utf-8", "surrogatepass")
