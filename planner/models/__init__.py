"""What is planned: presets, configurations, the user's modules, and the workloads they are run with."""
