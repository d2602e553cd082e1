"""``python -m tierbed``: the command line."""

from tierbed.cli import main

main()
