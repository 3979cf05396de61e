"""AdamW with 8-bit or FP8 moments by torchao. A framework imports the class by its dotted path."""
