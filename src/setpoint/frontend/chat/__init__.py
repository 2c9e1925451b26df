"""Chat, whichever API asks for it: messages become a prompt, and the text of an answer becomes
typed deltas."""
