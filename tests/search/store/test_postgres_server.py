"""The server that tests start: it keeps what was committed when it is killed, and dies with the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from paths import SUPPORT
from postgres_server import Server


def test_what_was_committed_outlives_a_kill(server: Server) -> None:
    url = server.url()
    with psycopg.connect(url) as connection:
        connection.execute("create table kept (number integer)")
        connection.execute("insert into kept values (3)")
    server.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    server.start()
    with psycopg.connect(url) as connection:
        assert connection.execute("select number from kept").fetchall() == [(3,)]


def test_a_reader_reads_tables_of_later_too_and_writes_none(server: Server) -> None:
    url = server.url("readers")
    reading = server.readonly_url("readers")
    with psycopg.connect(url) as connection:
        connection.execute("create table later (number integer)")
    with psycopg.connect(reading) as connection:
        assert connection.execute("select * from later").fetchall() == []
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("insert into later values (1)")


STARTER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from postgres_server import running_server
with running_server() as server:
    print(server.folder, flush=True)
    time.sleep(600)
"""


def test_it_ends_with_a_process_that_is_killed(server: Server) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(SUPPORT)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    folder = Path(starter.stdout.readline().strip())
    process = int((folder / "data" / "postmaster.pid").read_text().split()[0])
    os.kill(process, 0)
    starter.send_signal(signal.SIGKILL)
    starter.communicate()
    until = time.monotonic() + 60
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
