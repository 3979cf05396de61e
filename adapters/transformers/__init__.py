"""The trainer's side: Hugging Face models with FP8 linears and exact ops."""
