"""A trace to a cheaper one that says the same: attention's masks, keys and pages, merged projections, and editing."""
