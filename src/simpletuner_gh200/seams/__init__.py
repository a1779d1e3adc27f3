"""The only room that knows SimpleTuner: seams, adapters, and how they are installed and taken out again."""
