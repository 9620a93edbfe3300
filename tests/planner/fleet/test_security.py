"""Who gets into a fleet: where its ports are, and who is refused there."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster, Security

from fuseplan.planner.cli import main
from fuseplan.planner.errors import ConfigError
from fuseplan.planner.fleet import cluster
from fuseplan.planner.fleet.security import is_open, listening_host, tls_files

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of ports")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind(("::1", 0))
        return True
    except OSError:
        return False


def listening(process: int) -> set[tuple[str, int]]:
    """Address and port of all that a process and its children listen on."""
    root = psutil.Process(process)
    found = [one.laddr for each in (root, *root.children(recursive=True)) for one in each.net_connections("tcp")
             if one.status == psutil.CONN_LISTEN]
    return {(str(one.ip), int(one.port)) for one in found}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of a fleet's certificate, which signs itself, and of its key: the options that name them."""
    folder, made = tmp_path_factory.mktemp("keys"), Security.temporary()
    (folder / "fleet.pem").write_text(made.tls_client_cert)
    (folder / "fleet.key").write_text(made.tls_client_key)
    return ["--tls-ca", f"{folder}/fleet.pem", "--tls-cert", f"{folder}/fleet.pem", "--tls-key", f"{folder}/fleet.key"]


@contextmanager
def scheduler(host: str, security: Security | None = None) -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=0, processes=False, host=host, protocol="tls" if security else "tcp", security=security,
                      dashboard_address="127.0.0.1:0") as found:
        yield found


@pytest.mark.parametrize("host", [
    "127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")),
])
def test_a_worker_listens_only_where_it_reaches_its_scheduler(host: str, keys: list[str]) -> None:
    """Over IPv4 without TLS, over IPv6 with it."""
    has_tls = ":" in host
    files = [Path(one) for one in keys[1::2]]
    with tls_files(*files) if has_tls else warnings.catch_warnings():
        security = Security(
            require_encryption=True, tls_scheduler_cert=keys[3], tls_scheduler_key=keys[5]) if has_tls else None
        with scheduler(host, security) as found, Client(found) as client:
            command = [sys.executable, "-m", "fuseplan.planner", "fleet", "worker", found.scheduler_address,
                       "--device", "cpu", *(keys if has_tls else ())]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
                try:
                    client.wait_for_workers(1, timeout=240)
                    ports = listening(worker.pid)
                finally:
                    worker.send_signal(signal.SIGTERM)
                    printed, _ = worker.communicate(timeout=120)
    assert worker.returncode == 143 and "warning" not in printed, printed
    assert len(ports) == 3, "a nanny, a worker, and the worker's pages"
    assert {address for address, _ in ports} == {host.strip("[]")}


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Any]:
    with cluster.connected("local", "cpu") as client:
        yield client.cluster


def test_the_workers_of_a_host_are_reached_by_this_host_alone(own_cluster: Any) -> None:
    ports = listening(os.getpid())
    assert len(ports) >= 5 and all(ipaddress.ip_address(address).is_loopback for address, _ in ports)


def test_who_has_not_the_key_is_refused_by_the_workers_of_a_host(own_cluster: Any) -> None:
    """Another user of the host, who finds the ports."""
    (nanny,) = own_cluster.workers.values()
    addresses = [own_cluster.scheduler_address, nanny.worker_address, nanny.address]
    assert all(one.startswith("tls://") for one in addresses)
    for security in (Security(), Security.temporary()):
        for address in addresses:
            there = address if security.require_encryption else address.replace("tls://", "tcp://")
            with pytest.raises((OSError, TimeoutError)):
                Client(there, security=security, timeout=2)
    with Client(own_cluster.scheduler_address, security=own_cluster.security, timeout=60) as client:
        assert client.submit(os.getpid, pure=False).result() == nanny.pid


def test_the_workers_of_a_host_show_no_pages(own_cluster: Any) -> None:
    pages = 0
    for address, port in listening(os.getpid()):
        for page in ("", "/health", "/metrics", "/info/main/workers.html", "/json/identity.json"):
            try:
                with urllib.request.urlopen(f"http://{address}:{port}{page}", timeout=20) as found:
                    pytest.fail(f"{page} is shown: {found.read(200)!r}")
            except urllib.error.HTTPError as error:
                pages += error.code == 404
            except OSError:  # a port of Dask's
                break
    assert pages, "no port has answered at all"


@pytest.mark.parametrize(("host", "interface", "listens"), [
    (None, None, "127.0.0.1"), ("127.0.0.2", None, "127.0.0.2"), ("localhost", None, "localhost"),
    (None, "lo", "127.0.0.1"), ("0.0.0.0", None, "0.0.0.0"),
])
def test_whoever_starts_a_worker_may_say_where_it_listens(
    host: str | None, interface: str | None, listens: str
) -> None:
    with scheduler("127.0.0.1") as found, Client(found) as client:
        assert listening_host(client, host, interface) == listens


@pytest.mark.parametrize(("host", "interface", "words"), [
    ("192.0.2.1", None, "host 192.0.2.1"), ("no such host", None, "host no such host"),
    (None, "nosuch0", "interface nosuch0"), ("127.0.0.1", "lo", "leave one out"),
])
def test_a_place_that_is_none_of_this_machine_is_named(host: str | None, interface: str | None, words: str) -> None:
    there = SimpleNamespace(scheduler_comm=SimpleNamespace(comm=SimpleNamespace(local_address="tcp://127.0.0.1:1")))
    with pytest.raises(ConfigError, match=words):
        listening_host(there, host, interface)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["tune --pattern swiglu --shape 3x8 --workers", "fleet status", "fleet worker"])
@pytest.mark.parametrize(("change", "words"), [
    ({1: "nosuch.pem"}, "--tls-ca nosuch.pem"),
    ({3: "."}, "--tls-cert ."),
    ({1: "text"}, "--tls-ca text"),
    ({3: "text"}, "--tls-cert text"),
    ({5: "text"}, "--tls-key text"),
    ({5: "other.key"}, "--tls-key other.key"),
    ({4: None, 5: None}, "--tls-key"),
    ({0: None, 1: None}, "--tls-ca"),
    ({2: None, 3: None}, "--tls-cert"),
    (dict.fromkeys(range(6)), "--tls-ca"),
])
def test_files_that_cannot_be_used_are_named_with_their_option(
    command: str, change: dict[int, str | None], words: str, keys: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no certificate")
    Path("other.key").write_text(Security.temporary().tls_client_key)
    given = [word for at, one in enumerate(keys) if (word := change.get(at, one)) is not None]
    assert main.run([*command.split(), "tls://127.0.0.1:9", "--device", "cpu", *given]) == 2
    (told,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("plan: error")]
    assert words in told


@pytest.mark.parametrize("line", [
    "tune --pattern swiglu --shape 3x8 --workers local", "tune --pattern swiglu --shape 3x8", "fleet status",
    "fleet status tcp://127.0.0.1:9", "fleet worker tcp://127.0.0.1:9",
])
def test_keys_without_a_scheduler_that_takes_them_are_refused(
    line: str, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*line.split(), *keys]) == 2
    assert "tls://" in capsys.readouterr().err


def test_keys_of_dask_s_own_configuration_are_used_and_named(
    keys: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with tls_files(*(Path(one) for one in keys[1::2])):
        security = Security(require_encryption=True, tls_scheduler_cert=keys[3], tls_scheduler_key=keys[5])
        with scheduler("127.0.0.1", security) as found:
            line = ["fleet", "status", found.scheduler_address, "--db", str(tmp_path / "new.db")]
            assert main.run(line) == 0
            assert "warning" not in capsys.readouterr().err
    with tls_files(*(Path(one) for one in keys[1::2])):
        Path(keys[5]).rename(f"{keys[5]}.away")
        try:
            assert main.run(line) == 2
        finally:
            Path(f"{keys[5]}.away").rename(keys[5])
        (told,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("plan: error")]
        assert "distributed.comm.tls" in told


@pytest.mark.parametrize(("address", "found"), [
    ("tcp://127.0.0.1:8786", False), ("tcp://[::1]:8786", False), ("127.0.0.9:8786", False),
    ("tcp://192.0.2.1:8786", True), ("tcp://[2001:db8::1]:8786", True), ("192.0.2.1:8786", True),
    ("tls://192.0.2.1:8786", False), ("tcp://0.0.0.0:8786", True), ("no address", False),
])
def test_a_scheduler_without_a_key_is_open_to_other_hosts(address: str, found: bool) -> None:
    assert is_open(address) == found


def test_a_scheduler_that_anybody_can_command_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with scheduler("127.0.0.1") as found:
        line = ["fleet", "status", found.scheduler_address, "--db", str(tmp_path / "new.db")]
        assert main.run(line) == 0 and "warning" not in capsys.readouterr().err
        monkeypatch.setattr(cluster, "is_open", lambda address: True)
        assert main.run(line) == 0
        (told,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("plan: warning")]
        assert found.scheduler_address in told and "docs/fleet.md" in told
