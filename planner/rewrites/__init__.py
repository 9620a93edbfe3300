"""A trace to a cheaper one that says the same: attention's masks and shared keys, merged projections, and editing."""
