"""The one boundary to the GPU: an interface with a real (`cuda`) and a recording (`null`) implementation."""
