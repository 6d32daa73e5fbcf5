"""Which page goes first, what is worth a copy, and how long a prefetch may take."""
