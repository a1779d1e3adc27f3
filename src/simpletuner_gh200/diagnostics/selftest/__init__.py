"""``gh200 selftest``: the memory room's promises, checked on the device that is there, real or emulated."""
