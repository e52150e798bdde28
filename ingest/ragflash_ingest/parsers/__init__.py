"""One parser a media type; `parse_bytes` picks it."""
