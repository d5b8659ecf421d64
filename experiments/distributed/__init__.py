"""How trainings by many processes behave, one folder per question."""
