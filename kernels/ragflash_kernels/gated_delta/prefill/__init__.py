"""Many rows of one sequence: chunks of 64 as products of matrices."""
