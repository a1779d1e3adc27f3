"""What torch keeps of a model in training, and where it lives: optimizer state, EMA. Knows no SimpleTuner."""
