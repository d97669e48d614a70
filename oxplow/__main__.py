"""Lets `python -m oxplow` do what the `oxplow` program does."""

from oxplow.serve.cli import main

if __name__ == "__main__":
    main()
