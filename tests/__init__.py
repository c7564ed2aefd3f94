"""The test suite; a package, so that `python -m tests.fuzz` and `python -m tests.opdb` run its long parts."""
