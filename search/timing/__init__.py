"""How a kernel is checked and timed: clocks, screenings, deciding contests, sequences of kernels."""
