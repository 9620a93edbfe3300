"""Every sample kernel and every named pattern with every overlap, compiled for sm_90 without a GPU.

    python tests/checks/check_overlap_gpu.py [--backend triton]

Each must wait before it accesses memory, and let the next kernel start where it should, on every path of its PTX, and
must spill no register that it does not spill without overlap. Exits with status 1 otherwise. pytest does not collect
it: it takes minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuseplan.kernels.gpu.launch import Variant
from fuseplan.kernels.gpu.overlap import OVERLAP_CHOICES, plainly
from fuseplan.kernels.gpu.targets import read_resources
from fuseplan.kernels.ir.backend import SM90, Config
from fuseplan.kernels.ir.ir import KernelIR
from fuseplan.planner.patterns.listing import LISTING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from check_patterns_gpu import subjects
from interpret_kernels import backend_under_test, configs
from ir_samples import dynamic_samples, label, static_samples
from ptx_paths import overlap_faults

IN_GRAPH = replace(SM90, in_graph=True)


def kernels(folder: str) -> Iterator[tuple[str, KernelIR]]:
    """Samples and the groups of the patterns at their examples' shapes."""
    for sample in [*static_samples(), *dynamic_samples()]:
        yield label(sample), sample.ir
    for name, pattern in LISTING.items():
        for subject in subjects(name, pattern.example, folder):
            yield f"{name} {pattern.example}", subject.ir


def fault(backend: Any, ir: KernelIR, config: Config) -> str:
    """What is wrong with a configuration under any overlap; "" when nothing is."""
    plain = backend._compile(ir, config, IN_GRAPH, Variant())
    if "griddepcontrol" in plain.asm["ptx"] or plain.metadata.launch_pdl:
        return "overlaps without being told to"
    spills = read_resources(plain).spill_bytes or 0
    for overlap in OVERLAP_CHOICES:
        compiled = backend._compile(ir, {**config, "overlap": overlap}, IN_GRAPH, Variant())
        faults = overlap_faults(compiled.asm["ptx"], overlap)
        more = (read_resources(compiled).spill_bytes or 0) - spills
        # The search leaves out what arithmetic rules out, and drops what spills more than the default.
        faults += [f"spills {more} bytes more"] if more > 0 and not backend.infeasible(ir, config, IN_GRAPH) else []
        faults += [] if compiled.metadata.launch_pdl else ["is not launched so"]
        if faults:
            return f"{overlap}: {'; '.join(faults)}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("triton", "ninetoothed"), action="append")
    kinds = parser.parse_args().backend or ["triton", "ninetoothed"]
    checked = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            backend = backend_under_test(kind, folder)
            for name, ir in kernels(folder):
                if backend.refuse(ir, IN_GRAPH) is not None:
                    continue
                # The default and a narrow block, which loops over the columns of a reduction.
                for config in map(plainly, list(configs(backend, ir))[:2]):
                    found = fault(backend, ir, config)
                    checked, failed = checked + 1, failed + bool(found)
                    if found:
                        print(f"{kind} {name} {dict(config)}: {found}", flush=True)
    print(f"{checked} checked, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
