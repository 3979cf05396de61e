"""The part of the trainer's side that every training framework shares."""
