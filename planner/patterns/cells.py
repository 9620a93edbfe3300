"""Which patterns are measured at which sizes: the sweeps, and cells picked from them by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from fuseplan.planner.errors import Argument, ShapeError, UnknownPatternError
from fuseplan.planner.models.workload import read_size
from fuseplan.planner.patterns.listing import LISTING
from fuseplan.planner.patterns.table import PATTERNS, inputs_of

#: Rows of every sweep: decode of one sequence to a long prefill.
ROWS = (1, 8, 32, 128, 512, 4096, 16384)


@dataclass(frozen=True)
class Cell:
    """One pattern at one shape and dtype."""

    pattern: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> str:
        """The shape as text, ``"32x4096"``."""
        return "x".join(map(str, self.shape))

    @property
    def key(self) -> str:
        return f"{self.pattern} {self.size} {self.dtype}"


_GATED, _NORMS, _HEADS = (8192, 14336, 28672), (2048, 4096, 8192, 5120), (128,)
#: What is measured unless patterns are named, with the widths of a row.
SWEEPS: Mapping[str, tuple[int, ...]] = MappingProxyType({
    **dict.fromkeys(("swiglu", "geglu", "geglu_tanh"), _GATED),
    **dict.fromkeys(("add_rms_norm", "rms_norm", "layer_norm"), _NORMS),
    **dict.fromkeys(("rope", "qk_norm_rope"), _HEADS),
    "softmax": (4096, 32768),
    "causal_softmax": (4096, 16384),
    "sampling_softmax": (128256,),
    **dict.fromkeys(("rms_norm_fp8_token", "rms_norm_fp8_tensor"), _NORMS),
})
#: Rows at more than which no model uses a pattern.
_MOST_ROWS = {"sampling_softmax": 512}


def sweep_cells(
    names: Sequence[str] = (), rows: Sequence[int] = (), cols: Sequence[int] = (), dtype: str | None = None
) -> tuple[list[Cell], list[str]]:
    """The cells of the sweeps, and a sentence for everything that was left out.

    Empty arguments stand for all sweeps, :data:`ROWS`, a sweep's own widths, and each pattern's own dtype. ShapeError
    where no size fits a named pattern, or any of all.
    """
    if unknown := [name for name in names if name not in PATTERNS]:
        raise UnknownPatternError(unknown[0], PATTERNS)
    cells: list[Cell] = []
    left_out: dict[str, ShapeError] = {}
    for name in dict.fromkeys(names or SWEEPS):
        before = len(cells)
        for shape in _shapes(name, rows, cols):
            try:
                cells.append(cell(name, shape, dtype))
            except ShapeError as error:
                left_out[name] = error
        if names and len(cells) == before and name in left_out:
            raise left_out[name]
    if left_out and not cells:
        raise list(left_out.values())[-1]
    return cells, [f"some sizes of {name} are left out: {problem}" for name, problem in left_out.items()]


def _shapes(name: str, rows: Sequence[int], cols: Sequence[int]) -> Iterator[str]:
    """Shapes of a pattern's sweep, as text."""
    found = LISTING[name]
    if not {2, 4}.intersection(found.ranks):
        raise ShapeError("pattern {} takes {}; give {}, such as {} {}", name, found.dims, Argument("shape"),
                         Argument("shape"), found.example)
    outer, usual = ("", _NORMS) if 2 in found.ranks else ("1x32x", _HEADS)
    for width, count in product(cols or SWEEPS.get(name, usual), rows or ROWS):
        if count <= _MOST_ROWS.get(name, count):
            yield f"{outer}{count}x{width}"


def cell(name: str, shape: str, dtype: str | None = None) -> Cell:
    """A pattern at one shape; raises what :func:`inputs_of` does."""
    sizes, dtype, _ = inputs_of(name, shape, dtype)
    return Cell(name, sizes, dtype)


def parse_sizes(text: str | None, argument: str) -> tuple[int, ...]:
    """``"1,8,32"`` as numbers; () for None, and a :class:`ShapeError` for what is no list of sizes."""
    if text is None:
        return ()
    return tuple(dict.fromkeys(read_size(part.strip(), Argument(argument), "1,8,32") for part in text.split(",")))
