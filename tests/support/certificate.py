"""Certificates for this machine, which nobody has signed."""

import ssl
import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "own") -> tuple[str, str]:
    """The files of a certificate and of its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


def trusting(cert: str) -> ssl.SSLContext:
    """What a client has that trusts nothing but this."""
    return ssl.create_default_context(cafile=cert)
