"""Work on a data set's files in processes of its own, ahead of whoever needs them in order. Knows no SimpleTuner."""
