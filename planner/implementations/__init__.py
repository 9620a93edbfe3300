"""The ways to run a group, and a group as the search sees it: its operands, its ATen ops, its oracle."""
