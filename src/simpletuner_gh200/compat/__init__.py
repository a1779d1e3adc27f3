"""What earlier guides ask for: their import names, their files, and the rebase for a SimpleTuner tree of one's own."""
