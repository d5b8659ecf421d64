"""One bench: cases, measures and tables as data. Run `python -m experiments.bench`."""
