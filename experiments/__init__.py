"""What memplan is good for, one folder per question: a README, the code that answers it, small committed results."""
