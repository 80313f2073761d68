"""Tree speculative decoding for stock vLLM."""
