"""What a real GPU says of plans: numbers, memory, time, overlap."""
