"""Pages of any format as float16 tokens side by side, on a card."""
