"""HiCache in the engines of others: by their configuration, without patching them."""
