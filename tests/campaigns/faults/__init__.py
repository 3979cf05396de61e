"""Faults on purpose: a real vLLM engine in a Ray actor, the frameworks' own senders, and five questions after each fault."""
