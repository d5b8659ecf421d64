"""Applications of memplan at the size of a small project, one folder each."""
