"""The frontend's end of the link to the engine process."""
