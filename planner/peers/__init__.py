"""What our kernels are measured against, each asked for the same pattern on the same tensors."""
