"""Inside ``torch.compile``: the back end, its look-ups, kernels placed in a graph, fallbacks and CUDA graphs."""
