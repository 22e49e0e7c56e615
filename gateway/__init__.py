"""The REST API that clients see: OpenAI-compatible, and stateless but for the connections it has."""
