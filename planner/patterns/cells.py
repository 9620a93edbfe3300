"""Which patterns are measured at which sizes: the sweeps, and cells picked from them by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from types import MappingProxyType

from fuseplan.planner.errors import ShapeError, UnknownPatternError
from fuseplan.planner.models.size_text import read_size
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


@dataclass(frozen=True)
class Sweep:
    """The sizes of one pattern.

    Attributes:
        cols: Widths of a row.
        shapes: Ways to write a shape, with ``{rows}`` and ``{cols}``; the first one whose rank the pattern takes.
        most_rows: Rows beyond which no model uses the pattern.
    """

    cols: tuple[int, ...]
    shapes: tuple[str, ...] = ("{rows}x{cols}",)
    most_rows: int = ROWS[-1]


_HEADS = Sweep((128,), ("1x32x8x{rows}x{cols}", "1x32x{rows}x{cols}"))
_GATED = Sweep((8192, 14336, 28672))
_NORMS = Sweep((2048, 4096, 8192, 5120))

#: What is measured unless patterns are named; a name may be a wildcard.
SWEEPS: Mapping[str, Sweep] = MappingProxyType({
    "swiglu": _GATED,
    "geglu": _GATED,
    "geglu_tanh": _GATED,
    "add_rms_norm": _NORMS,
    "rms_norm": _NORMS,
    "layer_norm": _NORMS,
    "rope": _HEADS,
    "qk_norm_rope": _HEADS,
    "softmax": Sweep((4096, 32768)),
    "causal_softmax": Sweep((4096, 16384)),
    "sampling_softmax": Sweep((128256,), most_rows=512),
    "rms_norm_fp8*": _NORMS,
})


def sweep_cells(
    names: Sequence[str] = (), rows: Sequence[int] = (), cols: Sequence[int] = (), dtype: str | None = None
) -> tuple[list[Cell], list[str]]:
    """The cells of the sweeps, and a sentence for everything that was left out.

    What is empty stands for all sweeps, :data:`ROWS`, a sweep's own widths and each pattern's own dtype. A pattern
    without a sweep of its own is swept over rows and widths.

    Raises:
        UnknownPatternError: A name is no pattern.
        ShapeError: No size fits a named pattern, or none fits any.
    """
    notes: list[str] = []
    cells: list[Cell] = []
    last: ShapeError | None = None
    for name, sweep in _named(names, notes):
        fitting, problem = _fitting(name, sweep, rows or ROWS, cols or sweep.cols, dtype)
        if names and not fitting and problem is not None:
            raise problem
        if problem is not None:
            last = problem
            notes.append(f"some sizes of {name} are left out: {problem}")
        cells += fitting
    if not cells and last is not None:
        raise last
    return cells, notes


def _named(names: Sequence[str], notes: list[str]) -> list[tuple[str, Sweep]]:
    if unknown := [name for name in names if name not in PATTERNS]:
        raise UnknownPatternError(unknown[0], PATTERNS)
    if names:
        return [(name, _sweep_of(name)) for name in dict.fromkeys(names)]
    found: dict[str, Sweep] = {}
    for wanted, sweep in SWEEPS.items():
        matching = [name for name in PATTERNS if fnmatchcase(name, wanted)]
        if not matching:
            notes.append(f"there is no pattern {wanted}")
        found.update(dict.fromkeys(matching, sweep))
    return list(found.items())


def _sweep_of(name: str) -> Sweep:
    usual = _NORMS if 2 in PATTERNS[name].ranks else _HEADS
    return next((sweep for wanted, sweep in SWEEPS.items() if fnmatchcase(name, wanted)), usual)


def _fitting(
    name: str, sweep: Sweep, rows: Sequence[int], cols: Sequence[int], dtype: str | None
) -> tuple[list[Cell], ShapeError | None]:
    """The cells that the pattern takes, and why it does not take the others."""
    found = PATTERNS[name]
    text = next((shape for shape in sweep.shapes if shape.count("x") + 1 in found.ranks), None)
    if text is None:
        return [], ShapeError(f"pattern {name} takes {found.dims}; give --shape, such as --shape {found.example}")
    cells: list[Cell] = []
    problem: ShapeError | None = None
    for width, count in product(cols, (count for count in rows if count <= sweep.most_rows)):
        try:
            cells.append(cell(name, text.format(rows=count, cols=width), dtype))
        except ShapeError as error:
            problem = error
    return cells, problem


def cell(name: str, shape: str, dtype: str | None = None) -> Cell:
    """A pattern at one shape; raises what :func:`inputs_of` does."""
    sizes, dtype, _ = inputs_of(name, shape, dtype)
    return Cell(name, sizes, dtype)


def parse_sizes(text: str | None, option: str) -> tuple[int, ...]:
    """``"1,8,32"`` as numbers; () for None.

    Raises:
        ShapeError: It is no list of sizes.

    >>> parse_sizes("1,8", "--rows")
    (1, 8)
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(read_size(part, option, f"{option} 1,8,32") for part in parts))
