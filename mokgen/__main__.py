"""`python -m mokgen` and the `mokgen` command."""

from mokgen.cli import main

if __name__ == "__main__":
    main()
