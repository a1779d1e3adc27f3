"""Torch's own allocations beyond HBM: a MemPool over managed memory, with a byte limit and advice by pattern."""
