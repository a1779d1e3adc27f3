"""Unified memory on stock PyTorch: drivers, slabs, placement, ceilings, copies to the device, the pool of Grace memory."""
