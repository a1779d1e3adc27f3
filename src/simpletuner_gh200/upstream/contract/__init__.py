"""The contract, one file per area of SimpleTuner (and one for accelerate), each exporting ``SPECS``.

What we put at these places is in ``seams/points``, in a file of the same name.
"""
