"""Sequence packing: rows one after the other in one sequence, whose attention cannot see from one into another."""
