"""Held memory: immutable bytes under keys, shared by the ranks of a node. Knows no SimpleTuner."""
