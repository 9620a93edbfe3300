"""Attention in a pre-dispatch trace, before it is planned: what PyTorch would compute again in every call is left out.

Attention itself stays PyTorch's. What a trace asks of it costs more than it needs to, in three ways:

* keys and values that query heads share are copied for every head (:mod:`~fuseplan.planner.rewrites.grouped_queries`);
* a mask that is known to be causal is handed over as data (:mod:`~fuseplan.planner.rewrites.attention_masks`): a
  compiler's trace has it, since only with the numbers at hand can a model tell that it is causal;
* a boolean mask is turned into numbers by every call (the same module).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fuseplan.planner.rewrites.attention_masks import add_boolean_masks, drop_constant_masks
from fuseplan.planner.rewrites.grouped_queries import fold_grouped_queries


@dataclass(frozen=True)
class AttentionRewrites:
    """How many attention calls of a trace were rewritten, and how.

    ``grouped_queries`` read keys and values without a copy for every query head; ``dropped_masks`` had a mask that is
    constant, and causal or true everywhere; ``added_masks`` take their boolean mask as numbers, computed once for all
    of them.
    """

    grouped_queries: int = 0
    dropped_masks: int = 0
    added_masks: int = 0


def rewrite_attention(
    module: fx.GraphModule, grouped_queries: bool | None = None, masks: bool = True
) -> AttentionRewrites:
    """Rewrite every attention call of a pre-dispatch trace.

    Every node carries its fake value in ``meta["val"]``. ``grouped_queries`` is as
    :func:`~fuseplan.planner.rewrites.grouped_queries.fold_grouped_queries` takes it; ``masks`` says whether to rewrite
    masks.
    """
    dropped = drop_constant_masks(module) if masks else 0
    grouped = fold_grouped_queries(module, grouped_queries)
    added = add_boolean_masks(module) if masks else 0
    if dropped or grouped or added:
        module.graph.lint()
        module.recompile()
    return AttentionRewrites(grouped, dropped, added)
