"""Model architectures: what a GGUF file's tensors compute. `registry` finds the one that a file names."""
