"""``python -m tierbed.cli``."""

from tierbed.cli import main

main()
