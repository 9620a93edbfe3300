"""What our kernels are measured against: every peer by name, and how each is asked to compute a named pattern.

A peer is imported when it is built; one that cannot take part raises :class:`PeerError`, or what went wrong inside it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fuseplan.costmodel.devices import is_cpu, is_gpu
from fuseplan.kernels.gpu.overlap import plainly
from fuseplan.planner.dispatch_stats import Tally
from fuseplan.planner.errors import Argument, ConfigError, meant
from fuseplan.planner.implementations.generated_kernel import GeneratedKernel
from fuseplan.planner.implementations.implementation import PlannedGroup
from fuseplan.planner.implementations.inductor import inductor_settings
from fuseplan.planner.peers.contestant import EAGER, INDUCTOR, MAX_AUTOTUNE, Case, Contestant, PeerError, PeerOp
from fuseplan.planner.peers.libraries import FLASHINFER_OPS, LIGER_OPS
from fuseplan.planner.runtime.executor import executable

LIGER, FLASHINFER = "liger", "flashinfer"


@dataclass(frozen=True)
class Peer:
    """Somebody to measure against; ``build`` may raise anything, :class:`PeerError` with a reason at best."""

    build: Callable[[Case], Contestant]
    runs_on: Callable[[str], bool] = lambda device_type: True


def fused(case: Case, groups: Sequence[PlannedGroup]) -> Contestant:
    """The whole pattern with ``groups`` as kernels, called as dispatch runs it; PeerError where a group cannot run."""
    tally = Tally(f"bench {case.cell.pattern}")
    forward = executable(case.traced, groups, case.target, tally, case.numerics)
    if not tally.snapshot().fallbacks:
        forward(*case.inputs)  # a kernel that fails does so in its first call, and its ATen ops take over
    if seen := tally.snapshot().fallbacks:
        raise PeerError("; ".join(seen))
    return Contestant(forward)


def _inductor(case: Case, max_autotune: bool) -> Contestant:
    return Contestant(inductor_callable(case.traced.module, case.inputs, max_autotune))


def inductor_callable(chain: fx.GraphModule, inputs: Sequence[torch.Tensor], max_autotune: bool) -> Callable[..., Any]:
    """TorchInductor's generated program for a chain of ops, called as its own compiled graphs call it.

    Dynamo's guards and AOTAutograd's wrapper, which a model pays once, are not charged to the group, as with ours.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    programs: list[Callable[..., Any]] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        programs.append(compile_fx_inner(*args, **kwargs))
        return programs[-1]

    options = inductor_settings("max-autotune" if max_autotune else "default")
    compiled: Any = compile_fx(copy.deepcopy(chain), list(inputs), inner_compile=inner, config_patches=options)
    whole: Callable[..., Any] = compiled
    expected = whole(*inputs)
    if len(programs) != 1 or not _same(programs[0](list(inputs)), expected):
        return whole  # the calling convention is not the plain one for this chain
    program = programs[0]
    return lambda *operands: program(list(operands))


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Keep what TorchInductor prints of each matmul it tunes, and of choices that do not fit, off the terminal."""
    log = logging.getLogger("torch._inductor.select_algorithm")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


def _same(outputs: Any, expected: Any) -> bool:
    # The float8 types have no comparison of their own.
    return len(outputs) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True)
    )


def _default(case: Case, name: str) -> Contestant:
    """Our groups, each with the default configuration of one back end: what no search finds."""
    backend = next((one for one in case.backends if one.name == name), None)
    if backend is None:
        raise PeerError(f"{name} has no kernels for {case.target.device_type}")
    if reason := backend.unavailable():
        raise PeerError(reason)
    if not case.groups:
        raise PeerError("the plan fuses nothing")
    groups = []
    for group in case.groups:
        ir = case.kernel(group.ops).ir
        if refusal := backend.refuse(ir, case.target):
            raise PeerError(refusal)
        config = plainly(backend.default_config(ir, case.target))  # overlapped with nothing
        groups.append(replace(group, implementation=GeneratedKernel((backend,), case.target), config=config))
    return fused(case, groups)


def _library(case: Case, name: str, ops: Mapping[str, PeerOp]) -> Contestant:
    """A library of hand-written kernels, called through its ``ops`` by pattern."""
    found = ops.get(case.cell.pattern)
    if found is None:
        raise PeerError(f"{name} has no op for {case.cell.pattern}")
    if case.names != found.inputs:
        raise PeerError(f"{name}'s op takes {', '.join(found.inputs)}, the pattern {', '.join(case.names)}")
    if found.dtypes and case.cell.dtype not in found.dtypes:
        raise PeerError(f"{name}'s op takes {' and '.join(found.dtypes)}, not {case.cell.dtype}")
    return found.build(case)


#: Every peer, in the order of the tables.
PEERS: Mapping[str, Peer] = {
    # forward, not __call__: in a model the ops are lines of one function and pay for no module call.
    EAGER: Peer(lambda case: Contestant(case.traced.module.forward)),
    INDUCTOR: Peer(partial(_inductor, max_autotune=False)),
    MAX_AUTOTUNE: Peer(partial(_inductor, max_autotune=True)),
    LIGER: Peer(partial(_library, name=LIGER, ops=LIGER_OPS), is_gpu),
    FLASHINFER: Peer(partial(_library, name=FLASHINFER, ops=FLASHINFER_OPS), is_gpu),
    **{f"{name} default": Peer(partial(_default, name=name), is_gpu) for name in ("triton", "ninetoothed")},
    "cpp default": Peer(partial(_default, name="cpp"), is_cpu),
}


def peer_names(text: str | None, device_type: str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Peers in the order of the tables: those in ``text``, with commas between them, or all that the device has.

    A dash stands for a space; ``without`` are left out. An unknown name is a :class:`ConfigError`.
    """
    if text is None:
        wanted = {name for name, peer in PEERS.items() if peer.runs_on(device_type)}
    else:
        words = {" ".join(word.lower().replace("-", " ").split()) for word in text.split(",") if word.strip()}
        spelt = {name.replace("-", " "): name for name in PEERS} | {"max autotune": MAX_AUTOTUNE}
        wanted = {spelt.get(word, word) for word in words}
        known = [name.replace(" ", "-") for name in PEERS]
        there = ", ".join(known)
        for name in sorted(wanted - PEERS.keys()):
            raise ConfigError("{}: there is no peer {!r}; {}", Argument("peers"), name.replace(" ", "-"),
                              meant(name, known, f"known: {there}"))
        if not wanted:
            raise ConfigError("{} is empty; known: {}", Argument("peers"), there)
    return tuple(name for name in PEERS if name in wanted and name not in without)
