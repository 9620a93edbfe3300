"""Whether a fleet still answers: a worker that does not is started again, and a tune that nobody goes on with ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distributed import Client, Worker

from fuseplan.planner.errors import DeviceError, FuseplanError
from fuseplan.planner.fleet.cluster import workers_of
from fuseplan.planner.fleet.terms import device_of
from fuseplan.search.errors import MachineFailureError, SearchError


@dataclass(frozen=True)
class Patience:
    """Seconds: a scheduler or a worker that hangs is noticed within a minute.

    Attributes:
        look_s: From one look at the fleet to the next.
        answer_s: In which a scheduler answers. Longer than ``restart_s``, for which it waits.
        silent_s: After which a worker without a heartbeat is started again; Dask itself waits for five minutes.
        restart_s: In which a nanny ends a worker that hangs.
        gone_s: For which a device may have no worker: a new one imports PyTorch first.
    """

    look_s: float = 5.0
    answer_s: float = 20.0
    silent_s: float = 30.0
    restart_s: float = 10.0
    gone_s: float = 120.0


class Watch:
    """Looks at a fleet now and then.

    ``note`` is told of workers that are started again, ``stored`` says what the tune has stored so far.
    """

    def __init__(
        self, client: Client, note: Callable[[str], None], stored: Callable[[], str], patience: Patience | None = None,
    ) -> None:
        self.patience = patience if patience is not None else Patience()
        self._client, self._note, self._stored = client, note, stored
        scheduler: Any = client.scheduler
        self._scheduler, self._where = scheduler, str(scheduler.address)
        self._next = 0.0
        self._gone_since: dict[str, float] = {}

    def look(self, without_worker: Callable[[], set[str]]) -> None:
        """Start silent workers again. ``without_worker`` are devices that have none, but something to do.

        Raises:
            MachineFailureError: The scheduler does not answer, or nobody is left for a device.
        """
        if time.monotonic() < self._next:
            return
        try:
            lost = self._restart_silent()
            devices = without_worker()
        except (OSError, TimeoutError):
            raise self._no_scheduler() from None
        now = time.monotonic()
        self._next = now + self.patience.look_s
        self._gone_since = {one: self._gone_since.get(one, now) for one in devices}
        for device, since in self._gone_since.items():
            if lost or now - since >= self.patience.gone_s:
                raise self._ended(f"no worker of {device} answers any more", "Start one with `plan fleet worker`")

    def _restart_silent(self) -> bool:
        """Whether a worker could not be started again."""
        limits = self.patience
        silences = silences_s(self._client, limits.answer_s)
        silent = [address for address, seconds in silences.items() if seconds > limits.silent_s]
        found: Mapping[str, str] = self._client.sync(
            self._scheduler.restart_workers, workers=silent, timeout=limits.restart_s, wait_for_workers=False,
            on_error="return", stimulus_id="fuseplan-silent", callback_timeout=limits.answer_s) if silent else {}
        for address, outcome in found.items():
            then = "it is started again" if outcome == "OK" else "it is given up"
            self._note(f"the worker at {address} has not answered for {limits.silent_s:.0f} s: {then}")
        return any(outcome != "OK" for outcome in found.values())

    @contextmanager
    def in_words(self) -> Iterator[None]:
        """What Dask raises when its scheduler is lost comes out in our words.

        Raises:
            MachineFailureError: The scheduler is gone.
        """
        try:
            yield
        except (FuseplanError, SearchError):
            raise
        except Exception as error:
            if isinstance(error, CancelledError) or self._client.status != "running":
                raise self._no_scheduler() from None
            raise

    def _no_scheduler(self) -> MachineFailureError:
        return self._ended(f"the scheduler at {self._where} does not answer any more", "Start it again")

    def _ended(self, why: str, advice: str) -> MachineFailureError:
        return MachineFailureError(f"{why}; {self._stored()}. {advice}, and the same command goes on")


def silences_s(client: Client, answer_s: float = Patience.answer_s) -> dict[str, float]:
    """Seconds since the last heartbeat of each worker that owns a device, by its address.

    Raises:
        OSError, TimeoutError: The scheduler does not answer.
    """
    now = client.run_on_scheduler(time.time, callback_timeout=answer_s)  # by its clock: others differ
    return {address: now - one["last_seen"] for address, one in workers_of(client).items()
            if any(map(device_of, one["resources"]))}


def ask_workers(client: Client, function: Callable[..., Any], *args: Any, workers: Collection[str]) -> dict[str, Any]:
    """What each of these workers says, by its address.

    Raises:
        DeviceError: Not all of them answer.
    """
    try:
        found: dict[str, Any] = client.run(
            function, *args, workers=list(workers), callback_timeout=Patience.answer_s) if workers else {}
        return found
    except (OSError, TimeoutError):
        raise DeviceError(f"not all of {len(workers)} workers answer; `plan fleet status` says which, and ended ones "
                          "are started again") from None


#: Names of tasks that are not of a region, in words.
_WORDS = {"time_step": "timing a whole step", "time_again": "checking shipped times", "probe_device": "probing",
          "probe": "probing", "capture": "capturing", "prepare": "preparing"}
#: Seconds without a heartbeat after which nothing is asked of a worker any more; hundreds of workers send one in five.
_SILENT_S = 15.0


def device_statuses(client: Client) -> list[tuple[str, str, str, str, int]]:
    """Each worker of a fleet: its device's key, its name, its host, what it does, and how many regions it has beside
    that.
    """
    found = []
    workers = workers_of(client)
    silent = {address: seconds for address, seconds in silences_s(client).items() if seconds > _SILENT_S}
    running: Mapping[str, Sequence[Any]] = ask_workers(client, _under_way, workers=workers.keys() - silent.keys())
    given = client.processing()
    for address, worker in workers.items():
        under_way = running.get(address, ())
        measured = [one for one in map(region_of, under_way) if one is not None]
        waiting = {one for one in map(region_of, given.get(address, ())) if one is not None} - set(measured)
        words = [f"measuring {label}" for _, label in measured]
        if address in silent:
            words = [f"has not answered for {silent[address]:.0f} s"]
        words = words or [_WORDS.get(name, name) for name in dict.fromkeys(map(_name, under_way))]
        found += [
            (device, str(worker["name"]), worker["host"], ", ".join(words) or "idle", len(waiting))
            for resource in worker["resources"] if (device := device_of(resource)) is not None
        ]
    return sorted(found)


def known_labels(client: Client) -> dict[str, str]:
    """By key: the regions that workers have."""
    keys = (key for given in client.processing().values() for key in given)
    return dict(one for one in map(region_of, keys) if one is not None)


def region_of(key: Any) -> tuple[str, str] | None:
    """Key and label of the region that a task measures; None of another task."""
    if isinstance(key, tuple) and str(key[0]).startswith("measure-"):
        return str(key[-3]), str(key[-1])
    return None


def _name(key: Any) -> str:
    return str(key[0] if isinstance(key, tuple) else key).partition("-")[0]


def _under_way(dask_worker: Worker) -> list[Any]:
    """Keys of the tasks that a worker executes at the moment."""
    return [task.key for task in dask_worker.state.executing]
