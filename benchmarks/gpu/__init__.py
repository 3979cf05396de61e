"""Speed on a Hopper GPU, relative to BF16 and to ceilings measured in the same run. Importing it needs no GPU."""
