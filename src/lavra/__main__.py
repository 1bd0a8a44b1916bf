"""`python -m lavra` is the same as the `lavra` command."""

from lavra.cli.main import main

if __name__ == "__main__":
    main()
