"""`python -m hicache` is the `hicache` command."""

from hicache.cli import main

if __name__ == "__main__":
    main()
