"""What a choice costs: its work, the model's price, what was measured, and what kernels cost each other."""
