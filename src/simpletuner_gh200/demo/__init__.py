"""The demo: a tiny real training run through the extension."""
