"""``python -m tierbed_bench``: the command line."""

from tierbed_bench.cli import main

main()
