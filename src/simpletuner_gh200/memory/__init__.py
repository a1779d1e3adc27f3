"""Unified memory on stock PyTorch: drivers, slabs, placement, views, device staging, the managed pool."""
