"""One model on several processes: how its weights and its work are divided among ranks."""
