"""Speed on a Hopper GPU, against BF16 and against ceilings measured in the same run. Nothing here needs one to be imported."""
