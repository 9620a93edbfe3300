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

from fuseplan.planner.errors import Argument, ConfigError

#: Dask's settings for each option: those of who asks, and of workers.
_SETTINGS = {
    Argument("tls_ca"): ("distributed.comm.tls.ca-file",),
    Argument("tls_cert"): ("distributed.comm.tls.client.cert", "distributed.comm.tls.worker.cert"),
    Argument("tls_key"): ("distributed.comm.tls.client.key", "distributed.comm.tls.worker.key"),
}


@contextmanager
def tls_files(ca: Path | None, cert: Path | None, key: Path | None) -> Iterator[None]:
    """Meanwhile Dask uses these files and refuses what is not encrypted; without any, its own configuration holds.

    The private key may stand in the file of the certificate. :class:`ConfigError` where a file is missing, is none in
    PEM form, or does not go with the others.
    """
    files = {option: str(file) for option, file in zip(_SETTINGS, (ca, cert, key), strict=True) if file is not None}
    if not files:
        yield
        return
    _refuse(files)
    settings = {name: files.get(option) for option, names in _SETTINGS.items() for name in names}
    with dask.config.set({**settings, "distributed.comm.require-encryption": True}):
        yield


def _refuse(files: Mapping[Argument, str]) -> None:
    ca, cert, key = _SETTINGS
    for option in (ca, cert):
        if option not in files:
            raise ConfigError(f"{' and '.join('{}' for _ in files)} cannot be used without {{}}; give it, too",
                              *files, option)
    for option, file in files.items():
        try:
            with Path(file).open("rb"):
                pass
            if option != key:
                ssl.create_default_context(cafile=file)
        except ssl.SSLError:
            raise ConfigError("{} {}: the file holds no certificate in PEM form", option, file) from None
        except OSError as error:
            raise ConfigError("{} {}: {}", option, file, error.strerror) from None
    option = key if key in files else cert
    try:  # an encrypted key would ask for its password at the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files[cert], files[option], password="")
    except (ssl.SSLError, OSError, ValueError):
        also = "" if option == key else "; give the key with {}"
        raise ConfigError("{} {}: the file holds no private key without a password that belongs to the certificate of "
                          f"{{}}{also}", option, files[option], cert, key) from None


def security_for(address: str) -> Security:
    """What Dask's configuration says for a scheduler at this address; :class:`ConfigError` where it does not fit."""
    found: Any = Security()
    encrypted = address.startswith("tls://")
    if found.require_encryption and not encrypted:
        raise ConfigError("{} is not encrypted; {}, {} and {}, and Dask's setting require-encryption, go with an "
                          "address that begins with tls://", address, *_SETTINGS)
    if encrypted:
        if not (found.tls_ca_file and found.tls_client_cert and found.tls_worker_cert):
            raise ConfigError("{} needs {}, {} and {}, or Dask's settings for TLS", address, *_SETTINGS)
        try:
            for role in ("client", "worker"):
                found.get_connection_args(role)
        except (OSError, ValueError) as error:
            raise ConfigError(f"Dask's settings for TLS (distributed.comm.tls) cannot be used: {error}") from None
    checked: Security = found
    return checked


def own_security() -> Security:
    """A key that only the processes of this run are told; ConfigError without ``cryptography``."""
    try:
        made: Security = Security.temporary()
        return made
    except ImportError:
        raise ConfigError("{} local needs cryptography; install it with: pip install 'fuseplan[fleet]'",
                          Argument("workers")) from None


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
    """The address that this host's workers listen on: the given one, else the one that reaches the scheduler.

    :class:`ConfigError` where the host or the network interface is none of this machine.
    """
    if host is not None and interface is not None:
        raise ConfigError("{} and {} both say where to listen; leave one out", Argument("host"), Argument("interface"))
    try:
        option, given = ("interface", interface) if interface is not None else ("host", host)
        host = get_ip_interface(interface) if interface is not None else host
        comm: Any = client.scheduler_comm
        host = host if host is not None else get_address_host(comm.comm.local_address)
        family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
            trial.bind(place)
    except (OSError, ValueError) as error:
        raise ConfigError("{} {}: no address of this machine to listen on ({})", Argument(option), given,
                          error) from None
    return str(unparse_host_port(host))
