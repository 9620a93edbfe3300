"""Who may command a fleet: Dask's ports run code that is sent to them, so only whoever has the key gets in."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Security
from distributed.comm.addressing import get_address_host, unparse_host_port
from distributed.utils import get_ip_interface

from fuseplan.planner.errors import ConfigError

#: Dask's settings for each option: those of who asks, and of workers.
_SETTINGS = {
    "--tls-ca": ("distributed.comm.tls.ca-file",),
    "--tls-cert": ("distributed.comm.tls.client.cert", "distributed.comm.tls.worker.cert"),
    "--tls-key": ("distributed.comm.tls.client.key", "distributed.comm.tls.worker.key"),
}


@contextmanager
def tls_files(ca: Path | None, cert: Path | None, key: Path | None) -> Iterator[None]:
    """Meanwhile Dask uses these files and refuses what is not encrypted; without any, its own configuration holds.

    The private key may stand in the file of the certificate.

    Raises:
        ConfigError: A file is missing, is none in PEM form, or does not go with the others.
    """
    files = {option: str(file) for option, file in zip(_SETTINGS, (ca, cert, key), strict=True) if file is not None}
    if not files:
        yield
        return
    _refuse(files)
    settings = {name: files.get(option) for option, names in _SETTINGS.items() for name in names}
    with dask.config.set({**settings, "distributed.comm.require-encryption": True}):
        yield


def _refuse(files: Mapping[str, str]) -> None:
    for option in ("--tls-ca", "--tls-cert"):
        if option not in files:
            raise ConfigError(f"{' and '.join(files)} cannot be used without {option}; give it, too")
    for option, file in files.items():
        try:
            with Path(file).open("rb"):
                pass
            if option != "--tls-key":
                ssl.create_default_context(cafile=file)
        except ssl.SSLError:
            raise ConfigError(f"{option} {file}: the file holds no certificate in PEM form") from None
        except OSError as error:
            raise ConfigError(f"{option} {file}: {error.strerror}") from None
    option = "--tls-key" if "--tls-key" in files else "--tls-cert"
    try:  # an encrypted key would ask for its password at the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files["--tls-cert"], files[option], password="")
    except (ssl.SSLError, OSError, ValueError):
        also = "" if option == "--tls-key" else "; give the key with --tls-key"
        raise ConfigError(f"{option} {files[option]}: the file holds no private key without a password that belongs to "
                          f"the certificate of --tls-cert{also}") from None


def security_for(address: str) -> Security:
    """What Dask's configuration says for a scheduler at this address.

    Raises:
        ConfigError: The address does not go with it, or a file of it cannot be used.
    """
    found: Any = Security()
    encrypted = address.startswith("tls://")
    if found.require_encryption and not encrypted:
        raise ConfigError(f"{address} is not encrypted; --tls-ca, --tls-cert and --tls-key, and Dask's setting "
                          "require-encryption, go with an address that begins with tls://")
    if encrypted:
        if not (found.tls_ca_file and found.tls_client_cert and found.tls_worker_cert):
            raise ConfigError(f"{address} needs --tls-ca, --tls-cert and --tls-key, or Dask's settings for TLS")
        try:
            for role in ("client", "worker"):
                found.get_connection_args(role)
        except (OSError, ValueError) as error:
            raise ConfigError(f"Dask's settings for TLS (distributed.comm.tls) cannot be used: {error}") from None
    checked: Security = found
    return checked


def own_security() -> Security:
    """A key of this run alone, which only its own processes are told; nobody else on this host gets in.

    Raises:
        ConfigError: ``cryptography`` is not installed.
    """
    try:
        made: Security = Security.temporary()
        return made
    except ImportError:
        raise ConfigError(
            "--workers local needs cryptography; install it with: pip install 'fuseplan[fleet]'") from None


def is_open(address: str) -> bool:
    """Whether other hosts may reach a scheduler without a key: not over TLS, nor where its address is a loopback."""
    if address.startswith("tls://"):
        return False
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(get_address_host(address), None)}
    except (OSError, ValueError):
        return False  # it is no address of a scheduler
    return not all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


def listening_host(client: Client, host: str | None, interface: str | None) -> str:
    """The address that this host's workers listen on: the given one, else that from which the client reaches the
    scheduler.

    Raises:
        ConfigError: The host or the network interface is none of this machine.
    """
    if host is not None and interface is not None:
        raise ConfigError("--host and --interface both say where to listen; leave one out")
    try:
        option, given = ("--interface", interface) if interface is not None else ("--host", host)
        host = get_ip_interface(interface) if interface is not None else host
        comm: Any = client.scheduler_comm
        host = host if host is not None else get_address_host(comm.comm.local_address)
        family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
            trial.bind(place)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {given}: no address of this machine to listen on ({error})") from None
    return str(unparse_host_port(host))
