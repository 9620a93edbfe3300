"""A trace to a cheaper one that says the same: attention's masks, shared keys and pages, merged projections, and editing."""
