"""The rebase workflow for those who keep a SimpleTuner tree of their own.

Upstream's code first, untouched, on a fresh branch; then this package, vendored; then three lines that hook it in.
Every step is journaled before and after, so that an interrupted run goes on where it stopped.
"""
