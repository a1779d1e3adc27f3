"""What torch keeps of a model in training, and where it lives: state, EMA, activations. Knows no SimpleTuner."""
