"""What an operator can learn of this machine and of a running cache."""
