"""One bench: cases, measures and tables as data. `python -m experiments.bench`; README.md says what came out."""
