"""`python -m kvactors.cli`."""

from kvactors.cli.root import main

main()
