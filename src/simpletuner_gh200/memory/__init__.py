"""Memory on stock PyTorch: drivers, slabs, placement, ceilings, copies to the device, a pool of Grace memory."""
