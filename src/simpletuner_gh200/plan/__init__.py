"""Will it fit, where does each byte live, what bounds a step, and what is the cheapest change? Before a run."""
