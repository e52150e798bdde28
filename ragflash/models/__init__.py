"""Model architectures; `registry` finds the one that a GGUF file names."""
