"""Batches brought to the device ahead of use: order and depth (pure), and the thread that does it."""
