"""What the demos and comparisons share in every framework: recipes, processes, progress and the report."""
