"""Overlap of a kernel with those before and after it on its stream: programmatic dependent launch, from Hopper on.

A kernel launched with the attribute may start before the kernel ahead of it on the stream has ended, once each of that
kernel's programs has let it (or is done): that saves launch latency. What makes it right:

* *Every* kernel launched so waits, in *every* program, before its first access to global memory. The wait ends when the
  kernel ahead has completed and its writes can be seen, not when that kernel let others start.
* So a kernel has only completed after the one ahead of it has: by induction, all earlier ones have, whatever let whom
  start early. A program therefore sees all earlier writes, and overwrites nothing that is still to be read.
* A kernel launched without the attribute starts after all that is ahead of it on the stream, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.kernels.ir.backend import Config, Target, Tunable

#: Name of the parameter. Where a config lacks it, the kernel is launched as ever and has none of this.
OVERLAP = "overlap"
#: What is worth searching. ``"wait"``: start early, let the next kernel start at the end. ``"early"``: let it start as
#: soon as all programs have; they may then share the device with programs that only wait. ``"late"``: let it start when
#: all programs have issued their loads. (``"none"``, beside these, is as if the parameter were absent.)
OVERLAP_CHOICES = ("wait", "early", "late")
#: What generated Triton modules import; the same in all of Triton's versions since 3.4.
OVERLAP_IMPORT = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait"

_WAIT, _LET_NEXT_START = "gdc_wait()", "gdc_launch_dependents()"
#: Programs of up to so many elements, in more waves than these, run slower when they let the next kernel start.
_SMALL_TILE, _WAVES = 1024, 2


def overlap_of(config: Config) -> str:
    """``"none"``, ``"wait"``, ``"early"`` or ``"late"``."""
    return str(config.get(OVERLAP, "none"))


def is_overlapped(config: Config) -> bool:
    """Whether the kernel waits, and so must and may be launched with the attribute."""
    return overlap_of(config) != "none"


def overlap_tunables(target: Target) -> tuple[Tunable, ...]:
    """The parameter, where ``target`` has it; its first choice is the default."""
    choices = OVERLAP_CHOICES if target.in_graph else OVERLAP_CHOICES[:1]
    return (Tunable(OVERLAP, choices),) if target.gpu.overlaps else ()


def default_overlap(target: Target) -> Config:
    """The parameter's default: waiting costs nothing, and gains where the kernel ahead has a tail."""
    return {OVERLAP: OVERLAP_CHOICES[0]} if target.gpu.overlaps else {}


def plainly(config: Config) -> Config:
    """The config without overlap: for Triton's interpreter, which runs one program after another, and to compare."""
    return {name: value for name, value in config.items() if name != OVERLAP}


def pointless_overlap(config: Config, programs: int, elements: int, target: Target) -> str | None:
    """Why the overlap of ``config`` is not worth a try with so many programs and elements a tile, or None."""
    overlap = overlap_of(config)
    if overlap == "late" and programs <= target.cores:
        return "overlap=late gains nothing over early where all programs start at once"
    if overlap in ("early", "late") and elements <= _SMALL_TILE and has_waves(config, programs, target):
        return f"overlap={overlap} with {programs} programs of only {elements} elements"
    return None


def has_waves(config: Config, programs: int, target: Target) -> bool:
    """Whether so many programs run in several waves: the device does not hold them at once, by far."""
    return programs > _WAVES * target.cores * target.gpu.held_programs(int(config["num_warps"]))


def overlapped(statements: Sequence[str], config: Config, load: str, store: str) -> list[str]:
    """A program's top-level statements (a loop is one) with what ``config`` wants of overlap.

    The wait comes before the first statement that accesses memory, so that positions are computed while waiting. The
    next kernel may start at the very beginning (``"early"``), or (``"late"``) just ahead of the first statement that
    stores and that no other load follows. ``load`` and ``store`` are how these are spelled, with the parenthesis.
    """
    overlap, found = overlap_of(config), list(statements)
    if overlap == "none":
        return found
    end = len(found)
    first_access = next((at for at, text in enumerate(found) if load in text or store in text), end)
    if overlap == "late":
        last_load = max((at for at, text in enumerate(found) if load in text), default=first_access)
        found.insert(next((at for at in range(last_load, end) if store in found[at]), end), _LET_NEXT_START)
    found.insert(first_access, _WAIT)
    return [_LET_NEXT_START, *found] if overlap == "early" else found
