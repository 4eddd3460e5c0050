"""Wire formats of the clients: OpenAI chat completions and Responses, Anthropic Messages."""
