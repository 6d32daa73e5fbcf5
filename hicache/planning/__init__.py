"""What tiers to buy: hit rates and times to first token against sizes and policies, on one's own trace."""
