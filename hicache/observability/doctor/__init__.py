"""`hicache doctor`: what this machine can do for hicache, and what is missing. Nothing is changed."""
