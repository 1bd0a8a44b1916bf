"""KV-cache decoding and sampling."""
