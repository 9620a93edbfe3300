"""A model or a trace becomes a dataflow graph: traced, normalised, and kept on disk."""
