"""Plans measured on a real GPU: numbers, memory, time, overlap."""
