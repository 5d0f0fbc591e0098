"""What serves the papers' results and not a user's run: their tables, the recorded results, and pretraining. Not installed."""
