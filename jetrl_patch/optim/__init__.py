"""AdamW whose two moments are kept in 8 bits or FP8, by torchao; a framework imports the class by its path."""
