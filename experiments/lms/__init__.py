"""IBM's Large Model Support as a planner, beside memplan's, behind slow and fast links to the host."""
