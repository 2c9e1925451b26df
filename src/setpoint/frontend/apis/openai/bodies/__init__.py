"""What the bodies of OpenAI's API may hold, for all who read such bodies."""
