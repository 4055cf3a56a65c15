"""Requests and responses as they travel: OpenAI's, with vLLM's further fields and ours."""
