"""Attention kernels, written by hand in Triton and C++: no kernel description has two matmuls in a row."""
