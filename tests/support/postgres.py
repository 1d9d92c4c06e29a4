"""A real PostgreSQL for tests: a server in its own folder, and a fresh store on it."""

import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg.pq import PGconn, Ping

from tokenmill.engine.process.identity import Pid, descendants
from tokenmill.jobs.store.address import Address, PostgresAddress
from tokenmill.jobs.store.postgres import Postgres
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite import FILE

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "tell nobody:@/?%"
_USER = "mill"
_LIMIT_S = 120.0
_QUICK = ("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=off")
_SMALL = ("-c", "shared_buffers=64MB", "-c", "max_connections=60", "-c", "listen_addresses=")
_numbers = count()


@dataclass
class Cluster:
    """A server that runs, or that was stopped; it listens on a socket in its own folder."""

    folder: Path
    programs: Path
    safe: bool = False  # acknowledged commits are on disk
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def start(self) -> None:
        self.launch()
        self.await_ready()

    def await_ready(self) -> None:
        """Until it accepts connections."""
        end = time.monotonic() + _LIMIT_S
        while True:
            try:
                psycopg.connect(self.url()).close()
            except psycopg.OperationalError:
                assert self.process is not None
                assert self.process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < end, (self.folder / "log").read_text()
                time.sleep(0.02)
            else:
                return

    def launch(self, *options: str) -> None:
        """Start the server without waiting until it takes connections."""
        command: list[str | Path] = [
            *_as_nobody(),
            self.programs / "postgres",
            "-D",
            self.folder / "data",
            "-k",
            self.folder,
            *_SMALL,
            *(() if self.safe else _QUICK),
            *options,
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @contextmanager
    def starting_up(self) -> Iterator[Callable[[], None]]:
        """Restart the server so that it refuses connections with 57P03 until the function that this yields is called.

        It is a standby that takes no queries until it is promoted.
        """
        self.stop()
        (self.folder / "data" / "standby.signal").touch()
        self.launch("-c", "hot_standby=off")
        conninfo = self.url().encode()
        end = time.monotonic() + _LIMIT_S
        while PGconn.ping(conninfo) != Ping.REJECT:
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.02)

        def promote() -> None:
            assert self.process is not None
            while PGconn.ping(conninfo) != Ping.OK:  # it takes the order only once it waits for it
                assert time.monotonic() < end, (self.folder / "log").read_text()
                (self.folder / "data" / "promote").touch()
                self.process.send_signal(signal.SIGUSR1)
                time.sleep(0.1)

        yield promote

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: every connection is cut and all is written; SIGQUIT: as when the power fails; SIGKILL: the postmaster
        dies, and its children end when they notice."""
        if self.process is not None:
            below = [found for pid in descendants(self.pid) if (found := Pid.of(pid))]
            self.process.send_signal(how)
            self.process.wait(_LIMIT_S)
            self.process = None
            end = time.monotonic() + _LIMIT_S
            while any(child.alive for child in below):  # a new server refuses the shared memory that they use
                assert time.monotonic() < end, (self.folder / "log").read_text()
                time.sleep(0.01)

    @property
    def pid(self) -> int:
        """Of the postmaster; it must run."""
        assert self.process is not None
        return self.process.pid

    def backends(self) -> list[int]:
        """Processes that serve a connection now."""
        own = f"postgres: {_USER} ".encode()
        return [pid for pid in descendants(self.pid) if _command_line(pid).startswith(own)]

    def kill_backend(self, pid: int) -> None:
        """SIGKILL one of them, after which the server ends all others and recovers; returns when it accepts connections."""
        killed = Pid.here(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while killed is not None and Pid.here(pid) == killed:  # until it is reaped, the server does not know
            time.sleep(0.01)
        self.await_ready()

    def url(self, schema: str = "public", user: str = _USER, password: str | None = None) -> str:
        owner = user if password is None else f"{user}:{quote(password, safe='')}"
        return f"postgresql://{owner}@/postgres?host={self.folder}&options=-csearch_path%3D{schema}"

    def fresh(self) -> PostgresAddress:
        """A schema of its own."""
        schema = f"store_{next(_numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {schema}")
        return PostgresAddress(self.url(schema))


@contextmanager
def cluster(*, safe: bool = False) -> Iterator[Cluster]:
    """A new server, ended and removed afterwards. `safe`: it waits for the disk."""
    found = subprocess.run([ROOT / "scripts" / "postgres.sh"], capture_output=True, check=False, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-pg-"))  # a socket's path is short, and others must get there
    one = Cluster(folder, Path(found.stdout.strip()), safe=safe)
    try:
        if os.geteuid() == 0:  # which the server refuses to run as
            owner = _nobody()
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        folder.chmod(0o755)
        make: list[str | Path] = [
            *_as_nobody(),
            one.programs / "initdb",
            "-D",
            folder / "data",
            "-U",
            _USER,
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
        ]
        made = subprocess.run(make, capture_output=True, check=False, text=True, timeout=_LIMIT_S, cwd="/")
        assert made.returncode == 0, made.stderr
        one.start()
        yield one
    finally:
        one.stop(signal.SIGQUIT)
        shutil.rmtree(folder, ignore_errors=True)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _nobody() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _as_nobody() -> Sequence[str]:
    """Without rights, and gone when this process is."""
    tied = ("setpriv", "--pdeathsig", "QUIT")
    if os.geteuid() != 0:
        return tied
    owner = _nobody()
    return (*tied, f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups")


Ask = Callable[..., list[tuple[Any, ...]]]


@contextmanager
def past(address: Address) -> Iterator[Ask]:
    """Past the store to what it holds: a text of SQL with its values, which stand as ? in it."""
    if isinstance(address, PostgresAddress):
        with psycopg.connect(address.url, autocommit=True) as connection:

            def ask(text: str, *values: Any) -> list[tuple[Any, ...]]:
                found = connection.execute(text.replace("?", "%s"), values)
                return found.fetchall() if found.description else []

            yield ask
        return
    other = sqlite3.connect(address / FILE, isolation_level=None)
    try:
        yield lambda text, *values: other.execute(text, values).fetchall()
    finally:
        other.close()


def asked(address: Address, text: str, *values: Any) -> list[tuple[Any, ...]]:
    """The same for one text."""
    with past(address) as ask:
        return ask(text, *values)


def text_of(address: Address) -> str:
    """For another process's command line."""
    return address.url if isinstance(address, PostgresAddress) else str(address)


def database_of(store: StoreReader) -> Postgres:
    """The connection of an open store."""
    assert isinstance(store._database, Postgres)
    return store._database


def cut(store: StoreReader) -> None:
    """End a connection on the server's side, and wait until it is gone there."""
    pid = database_of(store)._connection.info.backend_pid
    asked(database_of(store).server, "SELECT pg_terminate_backend(?, 60000)", pid)
