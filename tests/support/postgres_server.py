"""A real PostgreSQL for tests: on loopback, as an unprivileged user, gone when the test process is."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ADMIN, READER, PASSWORD = "admin", "looker", "open-sesame"
#: Runs the server until its standard input says a line, or ends because the test process did: then its folder goes too.
_UNTIL_TOLD = '"$@" & read -r _ || gone=1; kill -QUIT $! 2>/dev/null; wait; [ -z "$gone" ] || rm -rf "$PWD"'
#: Nothing here has to survive a power cut.
_SETTINGS = ("fsync=off", "max_connections=200", "shared_buffers=32MB", "listen_addresses=127.0.0.1",
             "log_line_prefix=%d ")
_START_S = 120.0
#: What lets a role read one database, and nothing else.
READ_ONLY = (
    'grant connect on database "{database}" to {role}',
    "grant usage on schema public to {role}",
    "grant select on all tables in schema public to {role}",
    "alter default privileges in schema public grant select on tables to {role}",
)


def binaries() -> Path | None:
    """Debian's folder of the newest server, or the one that is on the path; None where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


class Server:
    """A server with databases of its own. It can be killed and started again, and keeps what was committed.

    ``folder`` is made for it; the user that the server runs as owns it.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self.folder = folder
        self._user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        password = folder / "password"
        password.write_text(PASSWORD)
        for path in (folder, password):
            os.chown(path, pwd.getpwnam(self._user).pw_uid, pwd.getpwnam(self._user).pw_gid)
        self._run("initdb", "-D", "data", "-U", ADMIN, "-A", "scram-sha-256", "--pwfile=password", "-E", "UTF8",
                  "--locale=C.UTF-8", "--no-sync")
        self.start()
        self.sql(f"create role {READER} login password '{PASSWORD}'")

    def url(self, name: str = "") -> str:
        """The URL of a new, empty database; one of that name is replaced. Starts a server that is down."""
        self.start()
        name = name or f"fresh{next(self._numbers)}"
        self.sql(f'drop database if exists "{name}" with (force)', f'create database "{name}"')
        return self.address(name)

    def address(self, name: str, user: str = ADMIN) -> str:
        """The URL of a database, whether it is there or not."""
        return f"postgresql://{user}:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    def readonly_url(self, name: str) -> str:
        """The same database for a role that may only read its tables, those of now and those of later."""
        self.sql(*(grant.format(database=name, role=READER) for grant in READ_ONLY), database=name)
        return self.address(name, READER)

    def writer_url(self, name: str) -> str:
        """The same database for a new role that may read and write its tables of now."""
        role = f"writer{next(self._numbers)}"
        self.sql(f"create role {role} login password '{PASSWORD}'",
                 f"grant all on all tables in schema public to {role}", database=name)
        return self.address(name, role)

    def disconnect(self, name: str) -> int:
        """Close every connection to a database from the server's side; how many those were."""
        ask = f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"
        return len(self.sql(ask))

    @contextlib.contextmanager
    def watched(self, name: str) -> Iterator[list[str]]:
        """What clients that connect from now on ask a database, as the server logs it; filled in at the end."""
        said: list[str] = []
        self.sql(f"alter database \"{name}\" set log_statement = 'all'")
        log = self.folder / "log"
        start = log.stat().st_size
        try:
            yield said
        finally:
            self.sql(f'alter database "{name}" reset log_statement')
            said += re.findall(rf"^{name} LOG:  (?:statement|execute \S+): (.*)", log.read_text()[start:], re.MULTILINE)

    def start(self) -> None:
        """Wait until the server answers; nothing where it does."""
        if self._process is None:
            settings = itertools.chain.from_iterable(("-c", one) for one in _SETTINGS)
            command = [str(self._programs / "postgres"), "-D", "data", "-p", str(self.port), "-k", str(self.folder)]
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    ["sh", "-c", _UNTIL_TOLD, "sh", *command, *settings], cwd=self.folder, stdin=subprocess.PIPE,
                    stdout=log, stderr=log, start_new_session=True, **self._identity(),
                )
        until = time.monotonic() + _START_S
        while not self._answers():
            if time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL does not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End the server and all that it runs with SIGKILL: it says goodbye to nobody."""
        if (process := self._process) is None:
            return
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            first = int((self.folder / "data" / "postmaster.pid").read_text().split("\n", 1)[0])
            others = Path(f"/proc/{first}/task/{first}/children").read_text().split()
            for one in (first, *map(int, others)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
        process.communicate(b"\n", timeout=60)
        self._process = None

    def restart(self) -> None:
        """Kill the server and start it again: the same databases on the same port."""
        self.kill()
        self.start()

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            self.sql("select 1")
            return True
        return False

    def sql(self, *statements: str, database: str = "postgres") -> Sequence[tuple[object, ...]]:
        """What the last statement answers."""
        import psycopg

        with psycopg.connect(self.address(database), autocommit=True, connect_timeout=10) as connection:
            for statement in statements:
                cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=300, **self._identity()
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr}")

    def _identity(self) -> dict[str, object]:
        """PostgreSQL refuses to run as root."""
        if os.geteuid() != 0:
            return {}
        return {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": []}


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A server while the context lasts; its folder goes with it. LookupError where PostgreSQL is not installed."""
    if (programs := binaries()) is None:
        raise LookupError("PostgreSQL's server is not installed (apt-get install postgresql)")
    with tempfile.TemporaryDirectory(prefix="fuseplan-server-", ignore_cleanup_errors=True) as folder:
        server = None
        try:
            server = Server(programs, Path(folder))
            yield server
        finally:
            if server is not None:
                server.kill()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for each process that runs tests; `url()` starts it again where a test has killed it."""
    pytest.importorskip("psycopg")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(running_server())
        except LookupError as error:
            pytest.skip(str(error))
        yield made
