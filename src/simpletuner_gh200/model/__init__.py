"""What training itself holds: optimizer state and activations in Grace. Knows no SimpleTuner."""
