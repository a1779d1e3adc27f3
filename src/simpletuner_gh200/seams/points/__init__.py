"""What we put at the places of the contract: one file per area of SimpleTuner, named as in ``upstream/contract``.

Each exports ``SEAMS``, a tuple of ``simpletuner_gh200.seams.seam.Seam``.
"""
