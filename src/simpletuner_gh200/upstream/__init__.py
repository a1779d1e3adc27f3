"""What we rely on in SimpleTuner: the contract as data, and its check from source alone."""
