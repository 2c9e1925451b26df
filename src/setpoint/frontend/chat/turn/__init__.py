"""One turn of a chat: from its messages to a request, and from text to what the model says."""
