"""A trace to a cheaper one that says the same: attention's masks and shared keys, and how a trace is edited."""
