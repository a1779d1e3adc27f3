"""Saved tensors in Grace: what autograd keeps for the backward pass leaves HBM and is back before it is needed."""
