"""Which choices run a region: the exact cover, the loop of measuring and solving, the plan that is stored."""
