"""Nothing but a name: ``TORCH_LOGS="fuseplan_kernels"`` shows the source of the kernels of compiled graphs.

PyTorch reads that variable while it is imported, and takes a name that it does not know for a module's.
"""
