"""`python -m ragflash` and the `ragflash` command."""

from ragflash.cli import app


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="ragflash")


if __name__ == "__main__":
    main()
