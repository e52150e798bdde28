"""`python -m ragflash` and the `ragflash` command."""

import os


def main() -> None:
    """Run the command line and exit."""
    # OpenMP threads that spin while they wait starve whatever else runs on the same cores; torch
    # reads this when it is imported, which the command line does late.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ragflash.cli import app  # noqa: PLC0415  (after the line above)

    app(prog_name="ragflash")


if __name__ == "__main__":
    main()
