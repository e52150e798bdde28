"""What is in a model file: metadata, tensors as stored, tokenizer and chat template. No torch."""
