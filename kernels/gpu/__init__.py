"""What the GPU back ends share: tiles, modules on disk, launches and their overlap."""
