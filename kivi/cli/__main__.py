"""`python -m kivi.cli`, for an environment whose scripts are not on the path."""

from kivi.cli import main

main()
