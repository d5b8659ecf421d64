"""What memplan costs where it has nothing to do, and where it has."""
