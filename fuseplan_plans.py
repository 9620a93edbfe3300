"""Nothing but a name: ``TORCH_LOGS="fuseplan_plans"`` shows the plans of compiled graphs.

PyTorch reads that variable while it is imported, and takes a name that it does not know for a module's.
"""
