"""A tune on many devices: Dask's scheduler gives regions to workers that own a device, and all write one database.

Needs the extra ``fuseplan[fleet]``.
"""
