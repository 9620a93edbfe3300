"""What an op is, and a model's dataflow graph: made, run op by op, bound to sizes and written down."""
