"""What memplan is good for: one bench, planners on bare graphs, a real GPU, many processes, and applications."""
