"""Unified caches: tensor records, fill, packs, tiers. Knows no SimpleTuner."""
