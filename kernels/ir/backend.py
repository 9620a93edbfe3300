"""The contract between the search and a kernel back end: tunables in, a checked and callable kernel out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fuseplan.costmodel.devices import Architecture, architecture, is_gpu

if TYPE_CHECKING:  # the database knows back ends, and opens without PyTorch
    import torch

    from fuseplan.kernels.ir.in_place import Reuse, ReuseOptions
    from fuseplan.kernels.ir.ir import KernelIR

#: A kernel configuration, by parameter name (never by position): JSON-able.
Config: TypeAlias = Mapping[str, int | str]
#: ``(shape, strides, dtype)`` of one output.
OutputLayout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], torch.dtype]"
#: Dynamic sizes -> layout of each output that a call makes.
Layouts: TypeAlias = Callable[[tuple[int, ...]], tuple[OutputLayout, ...]]
NOTHING: Reuse = MappingProxyType({})


class BuildError(Exception):
    """A kernel could not be generated or compiled; the message names the back end and the reason."""


class OutsideTable(IndexError):
    """A number by which a kernel looks up or writes is outside the table. It has written nothing that others see."""


class MachineError(BuildError):
    """The machine failed, not the kernel: a full disk, a folder that cannot be written, a compiler that is gone."""


@dataclass(frozen=True)
class Target:
    """The device a kernel is compiled for; enough to compile without the device being present."""

    #: A kind of :mod:`~fuseplan.costmodel.devices`.
    device_type: str
    #: ``"native"`` on CPUs, such as ``"sm_90"`` or ``"gfx942"`` on GPUs.
    arch: str
    #: CPU threads available, or streaming multiprocessors.
    cores: int
    l2_bytes: int = 0
    #: Kernels will be replayed in CUDA graphs; their defaults and tunables follow from it, nothing else.
    in_graph: bool = False

    @property
    def is_gpu(self) -> bool:
        return is_gpu(self.device_type)

    @property
    def gpu(self) -> Architecture:
        """What a GPU of this architecture has; :class:`BuildError` where nothing is known of it."""
        try:
            return architecture(self.arch)
        except ValueError as error:
            raise BuildError(str(error)) from None


def gpu_target(arch: str, cores: int, l2_bytes: int = 0) -> Target:
    """A GPU of an architecture that :mod:`~fuseplan.costmodel.devices` describes; ValueError for another."""
    return Target(architecture(arch).vendor, arch, cores, l2_bytes)


#: Compile-only target: what an H100/H200 offers, for machines that have no GPU.
SM90 = gpu_target("sm_90", 132, 50 * 2**20)


@dataclass(frozen=True)
class Tunable:
    """One dimension of a kernel's configuration space; ``choices`` are ordered, small to large."""

    name: str
    choices: tuple[int | str, ...]


def misfit(config: Config, parameters: Iterable[Tunable], complete: bool = True) -> str | None:
    """Why ``config`` is no choice of ``parameters`` (``complete``: of each), or None; it repeats none of its text."""
    known = {parameter.name: parameter.choices for parameter in parameters}
    if not known.keys() >= config.keys():
        return f"it has parameters that are unknown here (known: {', '.join(known) or 'none'})"
    if complete and (missing := known.keys() - config.keys()):
        return f"it lacks {', '.join(sorted(missing))}"
    for name, value in config.items():
        # 1 == 1.0 == True, but their texts differ.
        if type(value) not in (int, str) or value not in known[name]:
            return f"its {name} is none of the choices here"
    return None


def checked(config: Config, parameters: Iterable[Tunable]) -> Config:
    """``config``, if it holds nothing but choices of ``parameters``, else :class:`BuildError`; it may lack some."""
    if reason := misfit(config, parameters, complete=False):
        raise BuildError(f"the configuration cannot be used: {reason}")
    return config


@dataclass(frozen=True)
class Resources:
    """Facts read back from a compiled kernel. None where the back end cannot know."""

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class CompiledKernel(ABC):
    """A loaded kernel, called, without checks, with every buffer (inputs, then outputs), then the symbols' values."""

    resources: Resources = Resources()

    @abstractmethod
    def __call__(self, *args: torch.Tensor | int) -> None:
        """Launch on the current stream (CUDA) or run to completion (CPU)."""

    def fused(self, inputs: int, layouts: Layouts, reuse: Reuse = NOTHING) -> Callable[..., Any]:
        """``call(*inputs, *sizes)``, which makes the outputs that are not in ``reuse``, and returns all."""
        return allocating(self, inputs, layouts, reuse)


def allocating(
    run: Callable[..., None], inputs: int, layouts: Layouts, reuse: Reuse, device: torch.device | str = "cpu"
) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """:meth:`CompiledKernel.fused` of ``run``; outputs are made beside the first input, on ``device`` without one."""
    from torch import empty_strided as empty

    def call(*args: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sizes, beside = args[inputs:], args[0].device if inputs else device
        made = [empty(shape, strides, dtype=dtype, device=beside) for shape, strides, dtype in layouts(sizes)]
        for number in sorted(reuse):
            made.insert(number, args[reuse[number]])
        run(*args[:inputs], *made, *sizes)
        return made[0] if len(made) == 1 else tuple(made)

    return call


def fused_call(kernel: CompiledKernel, ir: KernelIR, reuse: Reuse = NOTHING) -> Callable[..., Any]:
    """``call(*inputs, *sizes)`` of a loaded kernel: makes the outputs as the IR says, runs, and returns one or a tuple.

    An output in ``reuse``, or one that the IR puts over an input, is written to that input and returned as it.
    """
    from fuseplan.kernels.ir.ops import torch_dtype

    symbols, reuse = ir.symbols, {**reuse, **ir.overwritten}

    @lru_cache(maxsize=1024)
    def layouts(sizes: tuple[int, ...]) -> tuple[OutputLayout, ...]:
        outputs = enumerate(ir.bind(dict(zip(symbols, sizes, strict=True))).outputs)
        made = [output for number, output in outputs if number not in reuse]
        return tuple((output.shape, output.strides, torch_dtype(output.dtype)) for output in made)

    return kernel.fused(len(ir.inputs), layouts, reuse)


class Backend(ABC):
    """A way to turn a :class:`KernelIR` into machine code. What cannot be built raises :class:`BuildError`."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    #: Whether calls raise :class:`OutsideTable`; elsewhere the device asserts, as it does for ATen's ops.
    raises_outside: ClassVar[bool] = False
    #: Every parameter that some kernel has here, with every value that one can be built with.
    parameters: ClassVar[tuple[Tunable, ...]] = ()

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this back end cannot be used on this machine at all (no compiler, no package), or None."""

    @abstractmethod
    def refuse(self, ir: KernelIR, target: Target) -> str | None:
        """Why this back end cannot express ``ir``, or None."""

    @abstractmethod
    def tunables(self, ir: KernelIR, target: Target) -> tuple[Tunable, ...]:
        """The configuration space of ``ir``; every combination is meaningful, not every one feasible."""

    @abstractmethod
    def infeasible(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        """Why ``config`` is not worth compiling (shared memory, registers, redundancy), or None. Pure arithmetic."""

    @abstractmethod
    def default_config(self, ir: KernelIR, target: Target) -> Config:
        """The configuration used when nothing has been tuned; always feasible."""

    def refuse_config(self, ir: KernelIR, config: Config, target: Target) -> str | None:
        """Why a stored ``config`` is none that a search could have chosen for ``ir`` here, or None."""
        reason = misfit(config, self.tunables(ir, target)) or self.infeasible(ir, config, target)
        return None if reason is None or same_config(config, self.default_config(ir, target)) else reason

    def suggestions(self, ir: KernelIR, target: Target) -> tuple[Config, ...]:
        """Configurations worth trying before any search, best guess first; () when there is no opinion."""
        return ()

    def likeness(self, ir: KernelIR) -> Hashable | None:
        """Kernels with equal keys run fast with the same configurations, so one search serves all; None: no key."""
        return None

    @abstractmethod
    def source(self, ir: KernelIR, config: Config) -> str:
        """The generated source text (for people, ``plan explain --source``, and the compile cache's key)."""

    def common(self, source: str) -> tuple[str, ...]:
        """The parts of a source that other kernels have, too: includes and helpers, each as it stands there."""
        return ()

    @abstractmethod
    def prepare(self, ir: KernelIR, config: Config, target: Target) -> Resources:
        """Compile into the on-disk cache without loading or needing the device; safe in a pool process."""

    def is_compiled(self, ir: KernelIR, config: Config, target: Target) -> bool:
        """Whether :meth:`prepare` finds the kernel in the cache, as far as can be told at once."""
        return False

    @abstractmethod
    def load(self, ir: KernelIR, config: Config, target: Target) -> CompiledKernel:
        """Compile (or reuse the cache) and load."""

    def fused_callable(self, ir: KernelIR, config: Config, target: Target) -> Callable[..., Any]:
        """:func:`fused_call` of the loaded kernel."""
        return fused_call(self.load(ir, config, target), ir)

    def reuse_options(self, ir: KernelIR, config: Config) -> ReuseOptions:
        """Inputs whose memory each output may take; none where kernels do not write in place."""
        return {}


def same_config(one: Config, other: Config) -> bool:
    """Whether two configs hold the same numbers and words: 1, 1.0, True and "1" are four different things."""
    return dict(one) == dict(other) and all(type(one[name]) is type(other[name]) for name in other)


def config_key(config: Config) -> str:
    """A canonical text for a config, equal for equal configs."""
    return ",".join(f"{name}={config[name]}" for name in sorted(config))
