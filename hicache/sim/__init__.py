"""Replay of real and generated traces through the cache, with a stand-in for the model."""
