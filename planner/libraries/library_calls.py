"""Every library call there is, always in the same order: a new one is a class in a file of its own, and a row here."""

from __future__ import annotations

from fuseplan.planner.libraries.attention_calls import ATTENTION_CALLS
from fuseplan.planner.libraries.decode_attention import SplitAttention
from fuseplan.planner.libraries.few_rows import FEW_ROWS
from fuseplan.planner.libraries.few_rows_attention import ROWS_ATTENTION
from fuseplan.planner.libraries.library_call import LibraryCall
from fuseplan.planner.libraries.matmul_calls import MATMUL_CALLS, MERGED_CALLS
from fuseplan.planner.libraries.short_rows import ShortRows

LIBRARY_CALLS: tuple[LibraryCall, ...] = (
    *ATTENTION_CALLS, SplitAttention(), ROWS_ATTENTION, FEW_ROWS, *MATMUL_CALLS, *MERGED_CALLS, ShortRows())
