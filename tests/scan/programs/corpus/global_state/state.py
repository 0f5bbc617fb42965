"""What the program remembers between calls."""
best_path = None
best_loss = float("inf")
