"""Settings: the models of our configuration blocks, where values come from, how they are loaded and checked."""
