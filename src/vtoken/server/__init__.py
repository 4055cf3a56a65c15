"""The HTTP server: OpenAI's API over `AsyncLLM`, metrics, a live view of the memory."""
