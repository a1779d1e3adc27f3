"""The contract, one file per module of SimpleTuner (or of accelerate), each exporting ``SPECS``.

What we put at these places is in ``seams/points``, in a file of the same name.
"""
