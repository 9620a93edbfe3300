"""Peak memory of a partition: the most intermediate bytes that live at once while its groups run in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuseplan.kernels.ir.in_place import choose_reuse
from fuseplan.planner.graph.dataflow import DataflowGraph
from fuseplan.planner.groups.candidates import Candidate
from fuseplan.planner.ops.table import written_value

#: For outputs of a group, the inputs whose memory each may take, by name.
NamedReuse = Mapping[str, tuple[str, ...]]


def peak_bytes(
    graph: DataflowGraph, groups: Sequence[Candidate], escaping: Sequence[str],
    reuse: Sequence[NamedReuse] | None = None
) -> int:
    """Largest number of bytes of produced values alive at once.

    ``groups`` are in running order; each allocates its outputs before it runs. Values that are ``escaping`` stay alive
    to the end. ``reuse`` says for each group which outputs need no memory of their own where an input dies in it. Only
    values that the groups produce count as inputs that die: of others it is not known here who else needs them. What an
    op writes to an operand takes none.
    """
    last_use: dict[str, int] = {}
    for step, group in enumerate(groups):
        for value in group.inputs:
            last_use[value] = step
    kept = set(escaping)
    alive: dict[str, int] = {}
    peak = 0
    for step, group in enumerate(groups):
        dying = [value for value in alive if value not in kept and last_use.get(value) == step]
        taken = choose_reuse(reuse[step], dying) if reuse is not None else {}
        for source in taken.values():
            del alive[source]
        for value in group.outputs:
            if (maker := graph.maker(value)) is None or written_value(maker) is None:
                alive[value] = graph.specs[value].nbytes(graph.symbols)
        peak = max(peak, sum(alive.values()))
        alive = {value: size for value, size in alive.items() if value in kept or last_use.get(value, -1) > step}
    return peak
