"""The trainer's side of a run, as far as it is the same in every training framework."""
