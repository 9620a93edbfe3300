"""A kernel's PTX: what can be reached from its entry without passing something first, and how wide accesses are."""

from __future__ import annotations

import re

from fuseplan.kernels.gpu.backend import GpuBackend
from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.gpu.tile import needs_int64
from fuseplan.kernels.ir.backend import SM90, Config
from fuseplan.kernels.ir.ir import KernelIR

ACCESS = r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.async\.c"
WAIT = r"griddepcontrol\.wait"
LET_NEXT_START = r"griddepcontrol\.launch_dependents"
END = r"\b(?:ret|exit);"


def reached(ptx: str, goal: str, without: str) -> list[str]:
    """Instructions matching ``goal`` on some path from the entry that holds none matching ``without``."""
    body = ptx[ptx.index(".entry") :]
    lines = [line.split("//")[0].strip() for line in body[body.index("{") :].splitlines()]
    labels = {match[1]: number for number, line in enumerate(lines) if (match := re.match(r"([$\w]+):", line))}
    pending, seen, found = [0], set[int](), []
    while pending:
        at = pending.pop()
        if at in seen or at >= len(lines) or re.search(without, lines[at]):
            continue
        seen.add(at)
        line = lines[at]
        if re.search(goal, line):
            found.append(line)
        branch = re.search(r"\bbra(?:\.uni)?\s+([$\w]+);", line)
        if branch:
            pending.append(labels[branch[1]])
        if line.startswith("@") or not (branch or re.search(END, line)):
            pending.append(at + 1)
    return found


def overlap_faults(ptx: str, overlap: str) -> list[str]:
    """What is wrong with a kernel that should overlap as ``overlap`` says; empty when all is well."""
    faults = [f"before the wait: {line}" for line in reached(ptx, f"{ACCESS}|{END}", WAIT)]
    if overlap in ("early", "late"):
        faults += [f"lets nothing start: {line}" for line in reached(ptx, END, LET_NEXT_START)]
    elif re.search(LET_NEXT_START, ptx):
        faults.append("lets the next kernel start")
    if overlap == "early":
        faults += [f"waits first: {line}" for line in reached(ptx, WAIT, LET_NEXT_START)]
    if overlap == "late":
        faults += [f"starts first: {line}" for line in reached(ptx, LET_NEXT_START, WAIT)]
    return faults


def vector_bytes(ptx: str) -> int:
    """Width of the narrowest vector load or store of more than one element in global memory; 0 without any."""
    widths = {int(count) * int(bits) // 8 for count, bits in re.findall(r"\.global\S*\.v([248])\.\w(\d+)", ptx)}
    return min(widths, default=0)


def ptx_of(backend: GpuBackend, ir: KernelIR, config: Config) -> str:
    """The PTX of a kernel for sm_90."""
    return str(backend._compile(ir, config, SM90, Variant(wide=needs_int64(ir))).asm["ptx"])
