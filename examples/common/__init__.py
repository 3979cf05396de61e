"""What demo and comparison share, whichever framework trains: processes, progress, and what is left behind."""
