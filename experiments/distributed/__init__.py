"""How trainings by many processes behave: right, killed, over a slow link, saved. A folder for each question."""
