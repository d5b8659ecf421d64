"""What memplan is good for, at the size of a small project: a folder for each."""
