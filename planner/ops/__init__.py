"""The table of ops, a row each, by family: how a kernel computes it, what it views or writes, what it costs."""
