"""CUDA graphs as a way to call a compiled graph: recorded in the second call of a kind, replayed from then on.

The first call runs plainly: then kernels are loaded, libraries have chosen, and failing groups have fallen back.
Parameters and what the graph writes (a static KV cache) are used where they lie; where they have moved, another
recording is made. Other arguments are copied in, and results out. What cannot be recorded runs plainly for good, with
the reason in ``stats().notes``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from fuseplan.costmodel.devices import is_gpu
from fuseplan.kernels.gpu.direct import find_launcher
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.runtime.cuda_recorder import CudaRecorder, cuda_recorder
from fuseplan.planner.runtime.replay_arguments import NotRecordable, Results, Roles, StaticInputs, why_unrecordable

logger = logging.getLogger(__name__)

#: Recordings that one graph keeps; the least recently used one goes.
KEPT_RECORDINGS = 8
#: Calls of a kind that must have been seen before a recording takes the place of one that may still be wanted: a
#: recording costs some calls.
PATIENCE = 8
#: Kinds of calls that are remembered while they are counted.
_REMEMBERED = 64

#: Sizes, then addresses of what is used where it lies.
_Kind: TypeAlias = tuple[tuple[Any, ...], Hashable]

#: The addresses of what a call uses where it lies, from its arguments.
AddressReader: TypeAlias = Callable[[tuple[Any, ...]], Hashable]
#: Replays a recording for the arguments of a call: its results.
_Replay: TypeAlias = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class _Recording:
    """``replay``, and the memory of the arguments that it uses where they lie."""

    replay: _Replay
    memory: tuple[StorageWeakRef, ...]

    def is_orphaned(self) -> bool:
        """Whether some of that memory was given up: ``generate()`` makes a static cache for each call."""
        return any(one.expired() for one in self.memory)


def graphed(
    function: Callable[..., Any], module: fx.GraphModule, stationary: Collection[int], device_type: str, tally: Tally,
    copy_outputs: bool = True
) -> Callable[..., Any]:
    """``function``, which computes what ``module`` does, replayed as a CUDA graph where that is possible.

    ``stationary`` are positions of arguments to use where they lie: those that do not move, and those it writes.
    Without ``copy_outputs`` it returns memory that the next call overwrites. ``tally`` counts what is not replayed.
    """
    recorder = find_recorder(device_type)
    if recorder is None:
        note_plain(tally, f"the graph runs on the {device_type.upper()}")
        return function
    if (reason := why_unrecordable(module, device_type)) is not None:
        note_plain(tally, reason)
        return function
    roles = Roles.of(module, stationary)
    launcher = find_launcher()
    read = None if launcher is None else launcher.address_reader(roles.kept, roles.held)
    return GraphedCall(function, roles, recorder, tally, copy_outputs, read_addresses=read).__call__


def find_recorder(device_type: str) -> CudaRecorder | None:
    """The recorder of the current device, None where there are no CUDA graphs."""
    return cuda_recorder(torch.cuda.current_device()) if is_gpu(device_type) else None


class GraphedCall:
    """A function of tensors and sizes, replayed where it can be; the last ``keep`` recordings are kept.

    ``read_addresses`` is a faster :func:`address_reader` for the same roles.
    """

    def __init__(
        self, function: Callable[..., Any], roles: Roles, recorder: CudaRecorder, tally: Tally,
        copy_outputs: bool = True, keep: int = KEPT_RECORDINGS, read_addresses: AddressReader | None = None
    ) -> None:
        self._function = function
        self._roles = roles
        self._recorder = recorder
        self._tally = tally
        self._copy_outputs = copy_outputs
        self._keep = keep
        self._read_addresses = read_addresses or address_reader(roles)
        self._plain = False
        self._recordings: OrderedDict[_Kind, _Recording] = OrderedDict()
        self._seen: OrderedDict[_Kind, int] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        if self._plain or self._recorder.busy():
            return self._function(*args)
        sizes = (*(args[at] for at in self._roles.sizes), *(args[at].shape for at in self._roles.shaped))
        kind = sizes, self._read_addresses(args)
        if kind not in self._recordings and not self._is_due(kind):
            return self._function(*args)
        with self._recorder.turn():
            try:
                recording = self._recordings.get(kind) or self._record(kind, args)
            except NotRecordable as error:
                self._plain = True
                self._recordings.clear()
                note_plain(self._tally, str(error))
            else:
                self._recordings.move_to_end(kind)
                return recording.replay(args)
        return self._function(*args)

    def _is_due(self, kind: _Kind) -> bool:
        """Count a plain call; True when the next thing to do with its kind is to record it."""
        needed = 1 if len(self._recordings) < self._keep or self._orphaned() is not None else PATIENCE
        before = self._seen.pop(kind, 0)
        if before >= needed:
            return True
        self._seen[kind] = before + 1
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _orphaned(self) -> _Kind | None:
        """The least recently used recording whose memory was given up."""
        return next((kind for kind, one in self._recordings.items() if one.is_orphaned()), None)

    def _record(self, kind: _Kind, args: Sequence[Any]) -> _Recording:
        statics = StaticInputs(args, self._roles)
        statics.fill(args)
        replaced = statics.replace(args)
        outputs, launch = self._recorder.record(self._function, replaced)
        results = Results(outputs, replaced, self._roles.held, self._copy_outputs)

        def replay(args: Sequence[Any]) -> Any:
            statics.fill(args)
            launch()
            return results.make(args)

        made = _Recording(replay, tuple(StorageWeakRef(args[at].untyped_storage()) for at in self._roles.kept))
        if len(self._recordings) >= self._keep:
            # Recording has waited for the device, so nothing runs in the one that goes.
            self._recordings.pop(self._orphaned() or next(iter(self._recordings)))
        self._recordings[kind] = made
        self._tally.count("recordings")
        return made


def address_reader(roles: Roles) -> AddressReader:
    """Reads the addresses of what a call uses where it lies, tensor by tensor."""
    return lambda args: (*(args[at].data_ptr() for at in roles.kept), *(tensor.data_ptr() for tensor in roles.held))


def note_plain(tally: Tally, reason: str) -> None:
    """Count and log that a graph is not replayed as a CUDA graph."""
    tally.note(f"no CUDA graph: {reason}")
    logger.info("graph %s is not replayed as a CUDA graph: %s", tally.compile_id, reason)
