"""The trainer's side of a Hugging Face model: FP8 linears and exact ops."""
