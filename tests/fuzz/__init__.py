"""Random programs under the backend: `python -m tests.fuzz --n 5000 --seed 0` or `--minutes 4`.

A case is a seed: the program, its inputs and what is checked follow from it alone. A failure is shrunk
and printed as a file that runs on its own.
"""
